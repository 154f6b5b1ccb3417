"""The Gramian of the rows as a CUDA graph."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation.gramians import packed_gramian, unpacked_gramian
from spcl.cuda_graphs.graphs import Graphs, Recurring

__all__ = ["CapturedGramian"]

Array = NDArray[np.float64]


class CapturedGramian:
    """:func:`~spcl.aggregation.gramians.gramian_and_numbers`, replayed where rows and numbers lie where they did."""

    def __init__(self, graphs: Graphs) -> None:
        self._recurring = Recurring(graphs)
        self._hosts: dict[int, Tensor] = {}

    def __call__(self, rows: Tensor, numbers: Tensor) -> tuple[Array, Array]:
        """The Gramian and the numbers, on the host."""
        length = len(rows) ** 2 + 1 + len(numbers)
        if length not in self._hosts:
            self._hosts[length] = torch.empty(length, dtype=torch.float64, pin_memory=True)
        host = self._hosts[length]

        def measure() -> None:
            host.copy_(packed_gramian(rows, numbers), non_blocking=True)

        self._recurring((rows.data_ptr(), len(rows), numbers.data_ptr(), len(numbers)), measure)
        torch.cuda.current_stream(rows.device).synchronize()
        return unpacked_gramian(host, rows)
