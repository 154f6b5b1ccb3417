"""Samples of classifiers on static tensors, for capture."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from spcl.cuda_graphs.joint_classifier import JointClassifier
from spcl.engine.model import Samples
from spcl.methods.replay import squared_distances

__all__ = ["Coefficients", "StaticSamples"]

Coefficients = tuple[float, float]
"""The coefficients of cross-entropy and of the squared distance to stored logits in the loss of a batch."""


class StaticSamples:
    r"""The samples of one or more batches on the tensors that a graph reads, and their losses.

    Every sample names the range of classes that its softmax covers (those of its task, or all that were added,
    perhaps with offsets), and with whose first class its stored logits begin, so that one graph serves all tasks and
    both scenarios. Its loss is
    :math:`\tfrac1n (a\, \ell + b\, d)` for a batch of n samples with the coefficients a of cross-entropy and b of the
    squared distance to stored logits.

    Args:
        joint: the classifier of all classes.
        x: inputs of the same shape and type.
        sizes: of the batches.
        coefficients: of the batches.
        keeps_logits: whether the logits are kept, for memory to store.

    Attributes:
        joint: as given.
        x: the inputs.
        logits: of every class there is room for, if they are kept.
    """

    def __init__(
        self,
        joint: JointClassifier,
        x: Tensor,
        sizes: Sequence[int],
        coefficients: Sequence[Coefficients],
        keeps_logits: bool,
    ) -> None:
        like, count = joint.weight.detach(), sum(sizes)
        self.joint = joint
        self.x = torch.empty((count, *x.shape[1:]), dtype=x.dtype, device=like.device)
        self.logits = like.new_zeros(count, joint.capacity) if keeps_logits else None
        self._table = torch.zeros(3, count, dtype=torch.int64, device=like.device)
        repeats = torch.tensor(sizes)
        each = torch.tensor(coefficients, dtype=torch.promote_types(like.dtype, torch.float32)) / repeats.unsqueeze(1)
        self._of_label, self._of_distance = each.repeat_interleave(repeats, dim=0).T.contiguous().to(like.device)
        has_distances = any(of_logits for _, of_logits in coefficients)
        self._stored = like.new_zeros(count * joint.capacity) if has_distances else None
        self._columns = torch.arange(joint.capacity, device=like.device)

    def fill(self, inputs: Sequence[Tensor], samples: Sequence[Samples]) -> None:
        """Copy the next samples, with these inputs, into the static tensors."""
        if len(inputs) == 1:
            self.x.copy_(inputs[0], non_blocking=True)
        else:
            torch.cat([part.to(self.x.device, self.x.dtype, non_blocking=True) for part in inputs], out=self.x)
        self._table.copy_(torch.from_numpy(self._table_of(samples)), non_blocking=True)
        parts = [group.stored for group in samples if group.stored is not None]
        if self._stored is not None and parts:
            stored = torch.cat([part.to(parts[0].device).flatten() for part in parts])
            self._stored[: len(stored)].copy_(stored, non_blocking=True)

    def losses(self, logits: Tensor) -> Tensor:
        """Return the loss of every sample; those of a batch add up to its loss."""
        if self.logits is not None:
            self.logits.copy_(logits.detach())
        labels, ranges, widths = self._table
        losses: Tensor = cross_entropy(self.joint.within(logits, ranges), labels, reduction="none") * self._of_label
        if self._stored is not None:
            stored = self._stored_logits(self._stored, ranges, widths)
            losses = losses + self._of_distance * squared_distances(logits, stored)
        return losses

    def _table_of(self, samples: Sequence[Samples]) -> NDArray[np.int64]:
        """Return every sample's label among all classes, its range of classes, and the number of its stored logits."""
        sizes = [group.y.shape[0] for group in samples]
        widths = [0 if group.stored is None else group.stored.shape[1] for group in samples]
        tasks = [group.task for group in samples]
        groups = [[task.offset for task in tasks], self.joint.ranges_of(samples), widths]
        table = np.repeat(np.array(groups), sizes, axis=1)
        table[0] += np.concatenate([group.y.numpy(force=True) for group in samples])
        return table

    def _stored_logits(self, stored: Tensor, first: Tensor, widths: Tensor) -> Tensor:
        """Return the stored logits, which lie one sample after another, at their classes; NaN where there are none."""
        column = self._columns - first.unsqueeze(1)
        is_stored = (column >= 0) & (column < widths.unsqueeze(1))
        place = column + (widths.cumsum(0) - widths).unsqueeze(1)
        return torch.where(is_stored, stored.take(torch.where(is_stored, place, 0)), math.nan)
