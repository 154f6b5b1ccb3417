"""The Gramian of the rows as a CUDA graph."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation.gramians import packed_gramian, unpacked_gramian
from spcl.learner.graphs import Graphs, Recurring

__all__ = ["CapturedGramian"]

Array = NDArray[np.float64]


class CapturedGramian:
    """:func:`~spcl.aggregation.gramians.gramian_and_numbers`, replayed where rows and numbers lie where they did."""

    def __init__(self, graphs: Graphs) -> None:
        self._recurring: Recurring[Tensor] = Recurring(graphs)

    def __call__(self, rows: Tensor, numbers: Tensor) -> tuple[Array, Array]:
        """The Gramian and the numbers, on the host."""
        key = rows.data_ptr(), len(rows), numbers.data_ptr(), len(numbers)
        return unpacked_gramian(self._recurring(key, lambda: packed_gramian(rows, numbers)), rows)
