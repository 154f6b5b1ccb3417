"""The gradient matrix by slices: every rank holds some columns of all rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spcl.distributed.world import World

__all__ = ["Slices"]


class Slices:
    """The columns of the gradient matrix that every rank holds: equally many, or all of them on every rank.

    Args:
        world: the ranks.
        length: n, the number of columns.
        whole: whether every rank holds all columns, for rules that need them.
    """

    def __init__(self, world: World, length: int, whole: bool) -> None:
        self._world = world
        self.length = length
        self.whole = whole
        self.width = length if whole else -(-length // world.size)
        self._buffers: dict[str, Tensor] = {}

    def columns(self, rank: int) -> slice:
        """Return the columns of a rank; those of the last ranks may be fewer."""
        start = 0 if self.whole else min(rank * self.width, self.length)
        return slice(start, min(start + self.width, self.length))

    def collect(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Exchange rows, of which every rank has so many, for slices; return the slices of the rows of every rank."""
        mine = self.columns(self._world.rank)
        width = mine.stop - mine.start
        parts = [rows[:, self.columns(rank)] for rank in range(self._world.size)]
        sent, received = [part.numel() for part in parts], [count * width for count in counts]
        packed, found = self._buffer("sent", sum(sent), rows), self._buffer("received", sum(received), rows)
        for part, target in zip(parts, torch.split_with_sizes(packed, sent), strict=True):
            target.view(part.shape).copy_(part)
        self._world.exchange(found, packed, received, sent)
        shaped = zip(torch.split_with_sizes(found, received), counts, strict=True)
        return [part.view(count, width) for part, count in shaped]

    def join(self, part: Tensor) -> Tensor:
        """Return the whole of a vector of which every rank has its columns."""
        if self.whole:
            return part
        whole = self._buffer("whole", self._world.size * self.width, part)
        return self._world.gather(part, whole)[: self.length]

    def _buffer(self, name: str, length: int, like: Tensor) -> Tensor:
        """Return a vector that is used again in the next step, since new memory costs more than what is sent."""
        if name not in self._buffers or len(self._buffers[name]) < length:
            self._buffers[name] = like.new_empty(length)
        return self._buffers[name][:length]
