"""The share of every batch that a rank computes, where ranks split batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from spcl.batches import map_leaves, sample_kind
from spcl.distributed.world import Group
from spcl.engine.model import Samples, SharedModel
from spcl.errors import SpclError
from spcl.losses import CrossEntropy
from spcl.methods.base import MEMORY, Method, Output

__all__ = ["Shares", "share_of"]

FEWEST_SAMPLES = 2  # of a share, as batch-norm needs
CHECKED_SAMPLES = 64
TOLERANCE = 1e-5


def share_of(rank: int, ranks: int, samples: int) -> slice:
    """Return which of a batch's samples a rank has: every so many-th, so that shares of a replay batch are alike.

    Batches of few samples are split over fewer ranks.

    >>> [share_of(rank, 3, 8) for rank in range(3)]
    [slice(0, 8, 3), slice(1, 8, 3), slice(2, 8, 3)]
    >>> [len(range(3)[share_of(rank, 2, 3)]) for rank in range(2)]
    [3, 0]
    """
    parts = min(ranks, max(samples // FEWEST_SAMPLES, 1))
    return slice(rank, samples, parts) if rank < parts else slice(0, 0, 1)


class Shares:
    r"""Splits batches over the ranks of a group, by whose shares a loss that is a mean over samples can be computed:

    .. math:: \ell(B) = \sum_j \frac{|B_j|}{|B|}\, \ell(B_j)

    Args:
        group: the ranks.
        model: the shared model.
        method: whose losses are computed.

    Attributes:
        must_be_everywhere: whether every rank must have a share of every batch, since its layers wait for all ranks.
        all_pass: whether every rank must make a pass over every batch; one without a share takes all of it, and its
            loss counts nothing.
    """

    def __init__(self, group: Group, model: SharedModel, method: Method) -> None:
        self._group = group
        self._model = model
        self._method = method
        self.must_be_everywhere = False
        self.all_pass = False
        self._checked: set[tuple[str, int]] = set()

    def of_batch(self, samples: int) -> slice:
        """Return which samples of a batch of so many this rank has."""
        return share_of(self._group.rank, self._group.size, samples)

    def own(self, samples: Sequence[Samples]) -> list[Samples]:
        """Return the share of this rank of a batch that is given by task; tasks of which it has no samples are absent.

        Their losses count as the part of the whole batch that the share is.
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
        """Raise an error if ranks have no share of a batch, but must, or if they would make different passes."""
        if self._group.size == 1:
            return
        total, kinds = sum(len(group.y) for group in samples), len({sample_kind(group.x) for group in samples})
        if self.all_pass and kinds > 1:
            raise SpclError(
                f"a batch of {' and '.join(group.task.name for group in samples)} has samples of {kinds} kinds, each "
                f"with a pass of its own, but all ranks must make the same passes through a sharded backbone; give "
                f"samples of one kind, or a backbone that is not sharded"
            )
        if self.must_be_everywhere and (total < FEWEST_SAMPLES * self._group.size or kinds > 1):
            raise SpclError(
                f"a batch of {' and '.join(group.task.name for group in samples)} has {total} samples of {kinds} "
                f"kinds, but SyncBatchNorm needs {FEWEST_SAMPLES} of one kind on each of {self._group.size} ranks; "
                f"give larger batches, or split tasks over the ranks"
            )

    # -- losses

    def check_tasks(self, batches: Sequence[Samples]) -> None:
        """Raise an error unless the losses of the tasks, when seen for the first time, are means over samples."""
        for group in batches:
            self._check(group.task.name, 0, [group], lambda outputs: self._method.task_loss(outputs[0]))

    def check_memory(self, samples: Sequence[Samples], draw: int) -> None:
        """Raise an error unless the loss of a replay batch, the first time, is a mean over samples."""
        self.check_sizes(samples)
        self._check(MEMORY, draw, samples, lambda outputs: self._method.memory_loss(outputs, draw))

    def _check(
        self, name: str, draw: int, samples: Sequence[Samples], loss: Callable[[Sequence[Output]], Tensor]
    ) -> None:
        if self._group.size == 1 or (name, draw) in self._checked or sum(len(group.y) for group in samples) < 2:
            return
        weighted = [group.task.name for group in samples if _has_class_weights(group)]
        if weighted:
            raise SpclError(
                f"the loss of task {weighted[0]!r} has class weights and is no mean over samples, so that ranks cannot "
                f"split its batches; leave the class weights out, or split tasks over the ranks"
            )
        with torch.no_grad(), self._model.evaluating():
            outputs = self._model.outputs([_every(group, slice(CHECKED_SAMPLES)) for group in samples])
            found = loss(outputs)
            whole, mean = float(found), _mean_of_shares(outputs, loss)
        rounding = max(TOLERANCE, torch.finfo(found.dtype).eps)
        if abs(whole - mean) > rounding * max(abs(whole), abs(mean), 1.0):  # not if any is NaN
            raise SpclError(
                f"the loss of {name!r} is {whole:g} on a batch, but {mean:g} as the mean of the losses of its samples, "
                f"so that ranks cannot split its batches; make it a mean over samples, or split tasks over the ranks"
            )
        if isfinite(whole):
            self._checked.add((name, draw))


def _mean_of_shares(outputs: Sequence[Output], loss: Callable[[Sequence[Output]], Tensor]) -> float:
    """Return the mean of the losses of two shares of unequal sizes, each counted as large as it is."""
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
