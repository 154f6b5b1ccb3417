"""The Gramian of the gradients as a CUDA graph."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation.gramians import packed_gramian, unpacked_gramian
from spcl.cuda_graphs.cache import GraphCache
from spcl.cuda_graphs.capture import GraphCapture

__all__ = ["GramianGraphs"]

Array = NDArray[np.float64]


class GramianGraphs:
    """:func:`~spcl.aggregation.gramians.gramian_and_numbers`, replayed for rows and numbers at the same addresses."""

    def __init__(self, capture: GraphCapture) -> None:
        self._cache = GraphCache(capture)
        self._hosts: dict[int, Tensor] = {}
        self._queued: tuple[Tensor, torch.cuda.Event] | None = None

    def start(self, rows: Tensor, numbers: Tensor) -> None:
        """Queue the Gramian of the rows, and the transfer of both to the host."""
        length = len(rows) ** 2 + 1 + len(numbers)
        if length not in self._hosts:
            self._hosts[length] = torch.empty(length, dtype=torch.float64, pin_memory=True)
        host = self._hosts[length]

        def work() -> None:
            host.copy_(packed_gramian(rows, numbers), non_blocking=True)

        self._cache.run((rows.data_ptr(), *rows.shape, numbers.data_ptr(), len(numbers)), work)
        self._queued = host, torch.cuda.current_stream(rows.device).record_event()

    def measure(self, rows: Tensor, numbers: Tensor) -> tuple[Array, Array]:
        """Return the Gramian of the rows, and the numbers, on the host, once they are there."""
        if self._queued is None:
            self.start(rows, numbers)
        assert self._queued is not None
        (host, is_done), self._queued = self._queued, None
        is_done.synchronize()
        return unpacked_gramian(host, rows)
