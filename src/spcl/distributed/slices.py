"""The gradient matrix by slices: every rank holds some columns of all rows."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from spcl.distributed.world import Group, World

__all__ = ["ShardSlices", "Slices"]

MOST_NUMBERS = 1 << 24
"""How many numbers are sent at once: buffers as large as these are held."""


class Slices:
    """The columns of the gradient matrix that every rank holds: equally many, or all of them on every rank.

    Ranks with shares of the same rows first sum these up, each for its columns. Ranks with different rows then exchange
    them.

    Args:
        world: the ranks.
        length: n, the number of columns.
        whole: whether every rank holds all columns, for rules that need them.
    """

    def __init__(self, world: World, length: int, whole: bool) -> None:
        self.length = length
        self._of_shares = _Columns(world.data, length, whole)
        self._of_tasks = _Columns(world.tasks, self._of_shares.width, whole)
        self.width = self._of_tasks.width

    @property
    def columns(self) -> slice:
        """The columns of this rank; those of some ranks may be fewer than their width."""
        first, part = self._of_shares.columns(), self._of_tasks.columns()
        start = min(first.start + part.start, first.stop)
        return slice(start, min(first.start + part.stop, first.stop))

    def collect(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Exchange rows for slices; return those of the rows of every task group, which has so many."""
        return self._of_tasks.exchanged(self._of_shares.summed(rows), counts)

    def join(self, part: Tensor) -> Tensor:
        """Return the whole of a vector of which every rank has its columns."""
        return self._of_shares.joined(self._of_tasks.joined(part))


class ShardSlices(Slices):
    """The columns of shards of gradients: the ranks that split batches have summed up theirs, each for its shard.

    Args:
        world: the ranks.
        length: the number of columns of this rank's shard.
    """

    def __init__(self, world: World, length: int) -> None:
        self.length = length
        self._of_tasks = _Columns(world.tasks, length, whole=False)
        self.width = max(self._of_tasks.width, 1)  # a rank without columns takes part in all that follows

    @override
    def collect(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        return self._of_tasks.exchanged(rows, counts)

    @override
    def join(self, part: Tensor) -> Tensor:
        return self._of_tasks.joined(part[: self._of_tasks.width])[: self.length]


class _Columns:
    """The columns that every rank of a group holds."""

    def __init__(self, group: Group, length: int, whole: bool) -> None:
        self._group = group
        self._length = length
        self._whole = whole
        self.width = length if whole else -(-length // group.size)
        self._buffers: dict[str, Tensor] = {}

    def columns(self, rank: int | None = None) -> slice:
        """Return the columns of a rank, by default this one; those of the last ranks may be fewer."""
        rank = self._group.rank if rank is None else rank
        start = 0 if self._whole else min(rank * self.width, self._length)
        return slice(start, min(start + self.width, self._length))

    def summed(self, rows: Tensor) -> Tensor:
        """Return the sum over the ranks of rows, which all of them have, in the columns of this rank."""
        if self._group.size == 1:
            return rows
        if self._whole:
            return self._group.sum(rows)
        result = self._buffer("summed", len(rows) * self.width, rows).view(len(rows), self.width)
        at_once = max(MOST_NUMBERS // max(self._length, 1), 1)
        for start in range(0, len(rows), at_once):
            some, target = rows[start : start + at_once], result[start : start + at_once]
            packed = self._buffer("packed", self._group.size * target.numel(), rows)
            for rank, part in enumerate(packed.view(self._group.size, *target.shape)):
                columns = self.columns(rank)
                part[:, : columns.stop - columns.start] = some[:, columns]
                part[:, columns.stop - columns.start :] = 0.0
            self._group.reduce_scatter(target.view(-1), packed)
        return result

    def exchanged(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Exchange rows, of which every rank has so many, for slices; return the slices of the rows of every rank."""
        if self._group.size == 1:
            return [rows]
        mine = self.columns()
        width = mine.stop - mine.start
        parts = [rows[:, self.columns(rank)] for rank in range(self._group.size)]
        sent, received = [part.numel() for part in parts], [count * width for count in counts]
        packed, found = self._buffer("sent", sum(sent), rows), self._buffer("received", sum(received), rows)
        for part, target in zip(parts, torch.split_with_sizes(packed, sent), strict=True):
            target.view(part.shape).copy_(part)
        self._group.exchange(found, packed, received, sent)
        shaped = zip(torch.split_with_sizes(found, received), counts, strict=True)
        return [part.view(count, width) for part, count in shaped]

    def joined(self, part: Tensor) -> Tensor:
        """Return the whole of a vector of which every rank has its columns."""
        if self._whole or self._group.size == 1:
            return part
        whole = self._buffer("whole", self._group.size * self.width, part)
        return self._group.gather(part, whole)[: self._length]

    def _buffer(self, name: str, length: int, like: Tensor) -> Tensor:
        """Return a vector that is used again in the next step, since new memory costs more than what is sent."""
        if name not in self._buffers or len(self._buffers[name]) < length:
            self._buffers[name] = like.new_empty(length)
        return self._buffers[name][:length]
