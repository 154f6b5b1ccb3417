"""A rank's part of a step: a share of every batch, and a slice of the gradient matrix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor
from typing_extensions import override

from spcl.batches import map_leaves, sample_kind
from spcl.engine.model import Samples, SharedModel
from spcl.engine.ranks.world import Group, World
from spcl.errors import SpclError
from spcl.losses import CrossEntropy
from spcl.methods.base import MEMORY, Method, Output
from spcl.tasks import Task

FEWEST_SAMPLES = 2
"""The fewest samples of a share: batch-norm needs two."""

CHECKED_SAMPLES = 64
"""The most samples used to check that a loss is a mean over samples."""

TOLERANCE = 1e-5


def share_of(rank: int, ranks: int, samples: int) -> slice:
    """Return a rank's share of a batch: every ``ranks``-th sample, so that shares of a replay batch are alike.

    Batches of few samples are split over fewer ranks.

    >>> [share_of(rank, 3, 8) for rank in range(3)]
    [slice(0, 8, 3), slice(1, 8, 3), slice(2, 8, 3)]
    >>> [len(range(3)[share_of(rank, 2, 3)]) for rank in range(2)]
    [3, 0]
    """
    parts = min(ranks, max(samples // FEWEST_SAMPLES, 1))
    return slice(rank, samples, parts) if rank < parts else slice(0, 0, 1)


class Shares:
    r"""Splits batches over the ranks of a group. A loss that is a mean over samples is the weighted mean over shares:

    .. math:: \ell(B) = \sum_j \frac{|B_j|}{|B|}\, \ell(B_j)

    Args:
        group: the ranks.
        model: the shared model.
        method: gives the losses.

    Attributes:
        must_be_everywhere: whether every rank must have a share of every batch, because layers wait for all ranks.
        all_pass: whether every rank must make a pass over every batch; a rank without a share then passes over the
            whole batch, with the factor 0 for its loss.
    """

    def __init__(self, group: Group, model: SharedModel, method: Method) -> None:
        self._group = group
        self._model = model
        self._method = method
        self.must_be_everywhere = False
        self.all_pass = False
        self._means = MeanCheck(model, "ranks", "split tasks over the ranks")

    def of_batch(self, samples: int) -> slice:
        """Return this rank's share of a batch of this size."""
        return share_of(self._group.rank, self._group.size, samples)

    def own(self, samples: Sequence[Samples]) -> list[Samples]:
        r"""Return this rank's share of a batch, given by source, without the sources that have no samples in the share.

        The loss of a share has the factor \|share| / \|batch|.
        """
        if self._group.size == 1:
            return list(samples)
        total = sum(len(group.y) for group in samples)
        chosen = self.of_batch(total)
        if self.all_pass and not chosen.stop:
            return [replace(group, share=0.0) for group in samples]
        part, parts, start = len(range(total)[chosen]) / total, list[Samples](), 0
        for group in samples:
            first = (chosen.start - start) % chosen.step
            if chosen.stop and first < len(group.y):
                parts.append(replace(_every(group, slice(first, None, chosen.step)), share=part))
            start += len(group.y)
        return parts

    def check_sizes(self, samples: Sequence[Samples]) -> None:
        """Raise if a rank that must have a share of the batch has none, or if ranks would make different passes."""
        if self._group.size == 1:
            return
        total, kinds = sum(len(group.y) for group in samples), len({sample_kind(group.x) for group in samples})
        if self.all_pass and kinds > 1:
            raise SpclError(
                f"a batch of {' and '.join(group.name for group in samples)} has samples of {kinds} kinds, each "
                f"with a pass of its own, but all ranks must make the same passes through a sharded backbone; give "
                f"samples of one kind, or a backbone that is not sharded"
            )
        if self.must_be_everywhere and (total < FEWEST_SAMPLES * self._group.size or kinds > 1):
            raise SpclError(
                f"a batch of {' and '.join(group.name for group in samples)} has {total} samples of {kinds} "
                f"kinds, but SyncBatchNorm needs {FEWEST_SAMPLES} of one kind on each of {self._group.size} ranks; "
                f"give larger batches, or split tasks over the ranks"
            )

    # -- losses

    def check_tasks(self, batches: Sequence[Samples]) -> None:
        """Raise unless the losses of new tasks are means over samples."""
        for group in batches:
            self._check(group.name, 0, [group], lambda outputs: self._method.task_loss(outputs[0]))

    def check_memory(self, samples: Sequence[Samples], draw: int) -> None:
        """Raise unless the loss of a replay batch is a mean over samples; each loss is checked once."""
        self.check_sizes(samples)
        self._check(MEMORY, draw, samples, lambda outputs: self._method.memory_loss(outputs, draw))

    def _check(
        self, name: str, draw: int, samples: Sequence[Samples], loss: Callable[[Sequence[Output]], Tensor]
    ) -> None:
        if self._group.size > 1:
            self._means.check(name, draw, samples, loss)


class MeanCheck:
    """Refuses losses that are no means over samples, whose batches cannot be split.

    Args:
        model: the shared model.
        splitter: who or what splits batches, for errors.
        advice: what to do instead, for errors.
    """

    def __init__(self, model: SharedModel, splitter: str, advice: str) -> None:
        self._model = model
        self._splitter = splitter
        self._advice = advice
        self._checked: set[tuple[str, int]] = set()

    def check(
        self, name: str, draw: int, samples: Sequence[Samples], loss: Callable[[Sequence[Output]], Tensor]
    ) -> None:
        """Raise an error unless the loss of a gradient, when it is new, is a mean over samples.

        Args:
            name: of the gradient.
            draw: the number of the replay batch; 0 for a task.
            samples: of the batch.
            loss: the loss as a function of the outputs.
        """
        if (name, draw) in self._checked or sum(len(group.y) for group in samples) < 2:
            return
        weighted = [group.task.name for group in samples if _has_class_weights(group)]
        if weighted:
            raise SpclError(
                f"the loss of task {weighted[0]!r} has class weights and is no mean over samples, so {self._splitter} "
                f"cannot split its batches; leave the class weights out, or {self._advice}"
            )
        with torch.no_grad(), self._model.evaluating():
            outputs = self._model.outputs([_every(group, slice(CHECKED_SAMPLES)) for group in samples])
            found = loss(outputs)
            whole, mean = float(found), _mean_of_shares(outputs, loss)
        rounding = max(TOLERANCE, torch.finfo(found.dtype).eps)
        if abs(whole - mean) > rounding * max(abs(whole), abs(mean), 1.0):  # not if any is NaN
            raise SpclError(
                f"the loss of {name!r} is {whole:g} on a batch, but {mean:g} as the mean of the losses of its samples, "
                f"so {self._splitter} cannot split its batches; make it a mean over samples, or {self._advice}"
            )
        if isfinite(whole):
            self._checked.add((name, draw))


def _mean_of_shares(outputs: Sequence[Output], loss: Callable[[Sequence[Output]], Tensor]) -> float:
    """Return the mean of the losses of two shares, weighted by their sizes, which are unequal."""
    total, mean = sum(len(output.targets) for output in outputs), 0.0
    flags = torch.arange(total, device=outputs[0].targets.device) % 3 == 0
    for chosen in (flags, ~flags):
        split = torch.split_with_sizes(chosen, [len(output.targets) for output in outputs])
        parts = [_some(output, mask) for output, mask in zip(outputs, split, strict=True) if bool(mask.any())]
        mean += float(loss(parts)) * (int(chosen.sum()) / total)
    return mean


def _some(output: Output, mask: Tensor) -> Output:
    stored = None if output.stored is None else output.stored[mask]
    return replace(output, value=output.value[mask], targets=output.targets[mask], stored=stored)


def _every(group: Samples, chosen: slice) -> Samples:
    stored = None if group.stored is None else group.stored[chosen]
    return replace(group, x=map_leaves(lambda leaf: leaf[chosen], group.x), y=group.y[chosen], stored=stored)


def _has_class_weights(group: Samples) -> bool:
    weights = group.task.loss.class_weights if isinstance(group.task.loss, CrossEntropy) else None
    return weights is not None and len(set(weights)) > 1


def shared_logits(
    world: World, shares: Shares, model: SharedModel, batches: Sequence[Samples], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the outputs of the heads on all batches, by source, given the outputs on this rank's shares."""
    shapes = {group.name: _shape(model, group.task) for group in batches if group.task.classes is not None}
    if len(shapes) < len(batches):  # for heads other than classifiers only a rank with samples knows the shape
        found = world.gather_objects({name: tuple(each.shape[1:]) for name, each in own.items()})
        shapes = {name: shape for each in found for name, shape in each.items()} | shapes
    logits = {
        group.name: torch.zeros(len(group.y), *shapes[group.name], dtype=model.dtype, device=model.device)
        for group in batches
        if group.name in shapes
    }
    for name in logits.keys() & own.keys():
        mine = logits[name][shares.of_batch(len(logits[name]))]
        mine.copy_(own[name][: len(mine)])  # empty if the share has the factor 0
    return dict(zip(logits, world.sum_all(list(logits.values())), strict=True))


def _shape(model: SharedModel, task: Task) -> tuple[int, ...]:
    """Return the shape of a sample's logits."""
    return (sum(each.classes or 0 for each in (model.classifiers if model.has_joint_logits else [task])),)


MOST_NUMBERS = 1 << 24
"""The most numbers to send at once, which is the size of the buffers."""


class Slices:
    """Splits the columns of the gradient matrix over the ranks: a slice each, or all columns on every rank.

    The ranks of a task group have the same rows, computed on different shares. They add these up first, each rank its
    own columns; then the task groups exchange rows for slices.

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
        """The columns of this rank; they may be fewer than ``width``."""
        first, part = self._of_shares.columns(), self._of_tasks.columns()
        start = min(first.start + part.start, first.stop)
        return slice(start, min(first.start + part.stop, first.stop))

    def collect(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Exchange rows for slices: return this rank's columns of the ``counts[g]`` rows of every task group g."""
        return self._of_tasks.exchanged(self._of_shares.summed(rows), counts)

    def join(self, part: Tensor) -> Tensor:
        """All-gather: return the whole vector, given this rank's columns."""
        return self._of_shares.joined(self._of_tasks.joined(part))


class ShardSlices(Slices):
    """Splits the columns of a shard of the gradients over the task groups; FSDP has added up the shares of a group.

    Args:
        world: the ranks.
        length: the number of columns of this rank's shard.
    """

    def __init__(self, world: World, length: int) -> None:
        self.length = length
        self._of_tasks = _Columns(world.tasks, length, whole=False)
        self.width = max(self._of_tasks.width, 1)  # a rank without columns takes part in every exchange

    @override
    def collect(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        return self._of_tasks.exchanged(rows, counts)

    @override
    def join(self, part: Tensor) -> Tensor:
        return self._of_tasks.joined(part[: self._of_tasks.width])[: self.length]


class _Columns:
    """Splits columns over the ranks of a group."""

    def __init__(self, group: Group, length: int, whole: bool) -> None:
        self._group = group
        self._length = length
        self._whole = whole
        self.width = length if whole else -(-length // group.size)
        self._buffers: dict[str, Tensor] = {}

    def columns(self, rank: int | None = None) -> slice:
        """Return the columns of a rank, by default this one; the last ranks may have fewer than ``width``."""
        rank = self._group.rank if rank is None else rank
        start = 0 if self._whole else min(rank * self.width, self._length)
        return slice(start, min(start + self.width, self._length))

    def summed(self, rows: Tensor) -> Tensor:
        """Reduce-scatter: return the sum of the rows over the ranks, in the columns of this rank."""
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
        """All-to-all: send column slices of my rows, receive my columns of the ``counts[r]`` rows of every rank r."""
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
        """All-gather: return the whole vector, given this rank's columns."""
        if self._whole or self._group.size == 1:
            return part
        whole = self._buffer("whole", self._group.size * self.width, part)
        return self._group.gather(part, whole)[: self._length]

    def _buffer(self, name: str, length: int, like: Tensor) -> Tensor:
        """Return a vector that later steps reuse, because allocating memory takes longer than sending the numbers."""
        if name not in self._buffers or len(self._buffers[name]) < length:
            self._buffers[name] = like.new_empty(length)
        return self._buffers[name][:length]
