"""Copying the samples of one task to the slots that are planned for them, without a failure half-way."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.memory.plan import Plan

__all__ = ["Rearrangement", "index_on_device", "select", "widened"]

Indices = NDArray[np.int64]


class Rearrangement:
    """Fields with room for the samples of a plan, and what is to be written into them.

    Making one allocates all memory and changes nothing; :meth:`apply` only copies.

    Args:
        fields: the samples that are stored.
        plan: of their changes.

    Attributes:
        fields: those of the samples after the changes, some of them the same tensors as before.
    """

    def __init__(self, fields: Mapping[str, Tensor], plan: Plan) -> None:
        self.fields: dict[str, Tensor] = {}
        self._writes: list[tuple[Tensor, Tensor, Tensor]] = []
        edited, added = list(plan.edited()), list(plan.added())
        slots, old = plan.moved()
        for name, field in _with_logits(fields, [samples for _, _, samples in (*edited, *added)]).items():
            self.fields[name] = _resized(field, len(plan.origins))
            if len(slots):
                self._write(name, index_on_device(slots, field), select(field, old))
        for slots, chosen, samples in edited:
            for name, values in samples.items():
                self._copy(name, slots, values, chosen)
        for slots, chosen, batch in added:
            for name, values in batch.items():
                self._copy(name, slots, values, chosen)
            if "logits" in self.fields and "logits" not in batch:
                logits = self.fields["logits"]
                unknown = logits.new_full((len(slots), *logits.shape[1:]), math.nan)
                self._write("logits", index_on_device(slots, logits), unknown)

    def apply(self) -> None:
        """Write everything; nothing is allocated."""
        for field, slots, values in self._writes:
            field.index_copy_(0, slots, values)

    def _copy(self, name: str, slots: Indices, samples: Tensor, chosen: Indices) -> None:
        """Write the chosen samples to slots; a GPU gets both numbers of each in one transfer."""
        targets, sources = index_on_device(np.stack([slots, chosen]), samples).unbind()
        self._write(name, targets, samples.detach().index_select(0, sources))

    def _write(self, name: str, slots: Tensor, values: Tensor) -> None:
        field = self.fields[name]
        if name == "logits":
            values = widened(values, max(field.shape[1:2], default=0))
        values = values.to(field.device, field.dtype, non_blocking=field.is_cuda)
        self._writes.append((field, index_on_device(slots, field), values))


def _with_logits(fields: Mapping[str, Tensor], batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the fields with logits for as many classes as those of batches, NaN where they are not known."""
    new = [batch["logits"] for batch in batches if "logits" in batch]
    if not new:
        return dict(fields)
    field = fields.get("logits")
    if field is None:
        inputs = next(field for name, field in fields.items() if name != "y")
        field = new[0].new_full((len(inputs), *new[0].shape[1:]), math.nan, device=inputs.device)
    width = max((width for logits in (field, *new) for width in logits.shape[1:2]), default=0)
    return {**fields, "logits": widened(field, width)}


def _resized(field: Tensor, size: int) -> Tensor:
    """Return a field, or a copy of it if its capacity is not between ``size`` and ``2 * size`` samples."""
    if size <= len(field) <= 2 * size:
        return field
    capacity = max(size, 2 * len(field)) if len(field) < size else size
    resized = field.new_empty((capacity, *field.shape[1:]))
    resized[: len(field)] = field[:capacity]
    return resized


def index_on_device(indices: Indices | Tensor, tensor: Tensor) -> Tensor:
    """Return indices into a tensor on its device."""
    indices = indices if isinstance(indices, Tensor) else torch.from_numpy(indices)
    return indices.to(tensor.device, non_blocking=tensor.is_cuda)


def select(tensor: Tensor, indices: Indices) -> Tensor:
    """Return a copy of the samples of these indices."""
    return tensor.detach().index_select(0, index_on_device(indices, tensor))


def widened(logits: Tensor, width: int) -> Tensor:
    """Return logits for so many classes, NaN for those that are added.

    >>> widened(torch.zeros(1, 2), 3)
    tensor([[0., 0., nan]])
    """
    if logits.ndim == 1 or logits.shape[1] == width:
        return logits
    wide = logits.new_full((len(logits), width, *logits.shape[2:]), math.nan)
    wide[:, : logits.shape[1]] = logits
    return wide
