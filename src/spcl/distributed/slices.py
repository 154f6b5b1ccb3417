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

    def columns(self, rank: int) -> slice:
        """Return the columns of a rank; those of the last ranks may be fewer."""
        start = 0 if self.whole else min(rank * self.width, self.length)
        return slice(start, min(start + self.width, self.length))

    def collect(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Exchange rows, of which every rank has so many, for slices; return the slices of the rows of every rank."""
        ranks = range(self._world.size)
        parts = [rows[:, self.columns(rank)] for rank in ranks]
        mine = self.columns(self._world.rank)
        received = [count * (mine.stop - mine.start) for count in counts]
        packed = torch.cat([part.reshape(-1) for part in parts])
        found = self._world.exchange(packed, [part.numel() for part in parts], received)
        shaped = zip(torch.split_with_sizes(found, received), counts, strict=True)
        return [part.view(count, mine.stop - mine.start) for part, count in shaped]

    def join(self, part: Tensor) -> Tensor:
        """Return the whole of a vector of which every rank has its columns."""
        return part if self.whole else self._world.gather(part)[: self.length]
