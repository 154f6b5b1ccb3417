"""Changes of the samples of one task that are planned, but not made."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Plan"]

Indices = NDArray[np.int64]


class Plan:
    """What every slot of a buffer is to hold, whatever the order in which samples came, were edited and evicted.

    Samples have numbers: those that are stored their slots, and new ones those that follow.

    Args:
        size: the number of samples that are stored.

    Attributes:
        origins: the number of the sample in each slot.
        empty: the fields, without samples, of a buffer that has none yet.
    """

    def __init__(self, size: int) -> None:
        self.origins: Indices = np.arange(size)
        self.empty: dict[str, Tensor] = {}
        self._size = size
        self._next = size
        self._batches: list[tuple[int, int, Mapping[str, Tensor]]] = []
        self._edits: list[tuple[Indices, Mapping[str, Tensor]]] = []

    def keep(self, chosen: Indices, batch: Mapping[str, Tensor], count: int) -> None:
        """Choose, for every slot, one of the samples in the slots so far, followed by ``count`` of a batch."""
        new = np.arange(self._next, self._next + count)
        self.origins = np.concatenate([self.origins, new])[chosen]
        self._batches.append((self._next, self._next + count, batch))
        self._next += count

    def edit(self, slots: Indices, samples: Mapping[str, Tensor]) -> None:
        """Replace fields of the samples in slots."""
        self._edits.append((self.origins[slots], samples))

    @property
    def changes(self) -> bool:
        """Whether any slot is to hold something else than now."""
        return bool(self._edits) or not np.array_equal(self.origins, np.arange(self._size))

    def moved(self) -> tuple[Indices, Indices]:
        """Return the slots of samples that are stored in others, and these."""
        slots = np.flatnonzero((self.origins < self._size) & (self.origins != np.arange(len(self.origins))))
        return slots, self.origins[slots]

    def edited(self) -> Iterator[tuple[Indices, Indices, Mapping[str, Tensor]]]:
        """Yield slots, which of the new samples each is to hold, and these, for fields that are replaced."""
        slot_of = np.full(self._next, -1)
        slot_of[self.origins] = np.arange(len(self.origins))
        for numbers, samples in self._edits:
            chosen = np.flatnonzero(slot_of[numbers] >= 0)
            if len(chosen):
                yield slot_of[numbers[chosen]], chosen, samples

    def added(self) -> Iterator[tuple[Indices, Indices, Mapping[str, Tensor]]]:
        """Yield slots, which of the new samples each is to hold, and these, for batches."""
        for begin, end, batch in self._batches:
            slots = np.flatnonzero((self.origins >= begin) & (self.origins < end))
            if len(slots):
                yield slots, self.origins[slots] - begin, batch
