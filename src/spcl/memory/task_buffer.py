"""Storage for the samples of one task."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs, from_leaves, leaves, map_leaves
from spcl.memory.plan import Plan
from spcl.memory.rearrangement import Rearrangement, select

__all__ = ["TaskBuffer", "input_fields"]

BATCH_SIZE = 256  # samples per call of the model in `store_logits`


class TaskBuffer:
    """The samples of one task: growing tensors ``x``, ``y`` and optionally ``logits``, contiguous without gaps.

    Inputs that are a dict or tuple of tensors have a field for each, e.g. ``x.tokens`` or ``x[0]``.

    The metadata used to choose samples is on the host, so that choosing does not synchronize with an accelerator:
    ``labels``, ``ranks`` and ``edits`` (how often a sample's inputs were replaced) have one entry per stored sample,
    followed by those of candidates that are not stored yet (:meth:`add_candidates`).
    :meth:`retain` stores the chosen candidates and evicts the samples that were not chosen.

    Attributes:
        classes: number of classes of the task; a task without classes counts as one class.
        labelled: whether the task has classes, so that ``y`` holds labels.
        running: whether the task still gets samples.
        size: number of stored samples.
        nbytes: bytes of all stored samples.
        known_kind: the kind of the last batch that was found to fit the stored samples.
    """

    def __init__(self, classes: int | None) -> None:
        self.classes = 1 if classes is None else classes
        self.labelled = classes is not None
        self.running = True
        self.size = 0
        self.labels: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.ranks: NDArray[np.float64] = np.empty(0)
        self.edits: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.fields: dict[str, Tensor] = {}
        self.nbytes = 0
        self.known_kind: object = None
        self._plan: Plan | None = None
        self._rearrangement: Rearrangement | None = None

    def allocate(self, x: Inputs, y: Tensor) -> None:
        """Plan fields for inputs like ``x``, which has no samples, and targets like ``y``, which are on the host."""
        self._planned().empty = input_fields(x) | {"y": torch.empty((0, *y.shape[1:]), dtype=y.dtype)}

    def labels_of(self, y: Tensor) -> NDArray[np.int64]:
        """Return the classes of targets ``y`` on the host; of probabilities the most likely ones."""
        if not self.labelled:
            return np.zeros(len(y), dtype=np.int64)
        labels = y.detach().cpu().argmax(dim=1) if y.is_floating_point() else y
        return labels.numpy(force=True).astype(np.int64)

    def add_candidates(self, ranks: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
        """Append the metadata of samples that :meth:`retain` may store."""
        self.ranks = np.concatenate([self.ranks, ranks])
        self.labels = np.concatenate([self.labels, labels])
        self.edits = np.concatenate([self.edits, np.zeros(len(ranks), dtype=np.int64)])

    def retain(self, kept: NDArray[np.bool_], batch: Mapping[str, Tensor]) -> None:
        """Keep the samples in the mask ``kept`` and evict the others; kept candidates come from ``batch``.

        Only the metadata changes at once. The samples themselves follow by :meth:`prepare` and :meth:`commit`, which
        must be called before they are read; :meth:`rollback` undoes the change.
        """
        source = _layout(kept, self.size)
        self._planned().keep(source, batch, len(self.ranks) - self.size)
        self.ranks, self.labels, self.edits = self.ranks[source], self.labels[source], self.edits[source]
        self.size = len(source)

    def replace(self, slots: NDArray[np.int64], samples: Mapping[str, Tensor]) -> None:
        """Replace fields of the samples ``slots``, and count the edits; as with :meth:`retain`, samples follow."""
        self._planned().edit(slots, samples)
        edits = self.edits.copy()  # the old array remains for a rollback
        edits[slots] += 1
        self.edits = edits

    def prepare(self) -> None:
        """Allocate what :meth:`commit` needs, unless that is done; a failure changes nothing."""
        if self._plan is not None and self._rearrangement is None and self._plan.changes:
            self._rearrangement = Rearrangement(self.fields or self._plan.empty, self._plan)

    def commit(self) -> None:
        """Copy the samples, which are prepared, to their slots."""
        if self._plan is None:
            return
        if self._rearrangement is None:
            self.fields = self.fields or self._plan.empty
        else:
            self._rearrangement.apply()
            self.fields = self._rearrangement.fields
            self._update_nbytes()
        self._plan = self._rearrangement = None

    @property
    def metadata(self) -> tuple[Any, ...]:
        """What is known of the samples: their number, labels, ranks and edits; and whether the task is running."""
        return self.size, self.labels, self.ranks, self.edits, self.running

    def rollback(self, metadata: tuple[Any, ...]) -> None:
        """Set the metadata back and forget what is planned."""
        self.size, self.labels, self.ranks, self.edits, self.running = metadata
        self._plan = self._rearrangement = None

    def inputs(self) -> Inputs | None:
        """Return the fields of the inputs, with room for more samples than are stored; None before the first batch."""
        return self.inputs_of(self.fields) if self.fields else None

    @staticmethod
    def inputs_of(fields: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs among fields, in the form in which they were observed."""
        if "x" in fields:
            return fields["x"]
        return from_leaves({name[1:]: field for name, field in fields.items() if name.startswith(("x.", "x["))})

    def take_inputs(self, slots: NDArray[np.int64]) -> Inputs:
        """Return a copy of the inputs of the samples ``slots``."""
        inputs = self.inputs()
        assert inputs is not None
        return map_leaves(lambda field: select(field, slots), inputs)

    @torch.no_grad()
    def store_logits(self, model: Callable[[Inputs], Tensor]) -> None:
        """Store the logits of ``model`` for every sample."""
        batches = -(-self.size // BATCH_SIZE)
        for first in range(batches):
            slots = np.arange(first, self.size, batches)  # of all classes, in whatever order they are stored
            self._overwrite_logits(slots, model(self.take_inputs(slots)))
        self._update_nbytes()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; the tensors are views of the stored ones."""
        return {
            "classes": self.classes if self.labelled else None,
            "running": self.running,
            "ranks": torch.from_numpy(self.ranks),
            "edits": torch.from_numpy(self.edits),
            "fields": {name: field[: self.size] for name, field in self.fields.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | None) -> "TaskBuffer":
        """Restore a buffer from :meth:`state_dict`, with inputs and logits on ``device`` (None: unchanged)."""
        buffer = cls(state["classes"])
        buffer.running = state["running"]
        buffer.ranks = state["ranks"].cpu().numpy().copy()
        buffer.edits = state["edits"].cpu().numpy().copy()
        buffer.size = len(buffer.ranks)
        devices = {"y": torch.device("cpu")}
        buffer.fields = {name: f.to(devices.get(name, device), copy=True) for name, f in state["fields"].items()}
        if buffer.fields:
            buffer.labels = buffer.labels_of(buffer.fields["y"])
        buffer._update_nbytes()
        return buffer

    def _update_nbytes(self) -> None:
        self.nbytes = sum([field.nbytes // len(field) * self.size for field in self.fields.values() if len(field)])

    def _planned(self) -> Plan:
        if self._plan is None:
            self._plan = Plan(self.size)
        self._rearrangement = None  # of an earlier state of the plan
        return self._plan

    def _overwrite_logits(self, slots: NDArray[np.int64], logits: Tensor) -> None:
        plan = Plan(self.size)
        plan.edit(slots, {"logits": logits})
        rearrangement = Rearrangement(self.fields, plan)
        rearrangement.apply()
        self.fields = rearrangement.fields


def input_fields(x: Inputs) -> dict[str, Tensor]:
    """Return the tensors of inputs by the names of their fields.

    >>> input_fields({"tokens": torch.tensor([[7]])})
    {'x.tokens': tensor([[7]])}
    """
    return {f"x{name}": leaf for name, leaf in leaves(x).items()}


def _layout(kept: NDArray[np.bool_], size: int) -> NDArray[np.int64]:
    """Return the old index of the sample in each new slot; stored samples move only to fill gaps."""
    chosen = np.flatnonzero(kept)
    source = np.arange(len(chosen))
    stays = kept[: len(chosen)] & (source < size)
    source[~stays] = chosen[chosen >= min(len(chosen), size)]
    return source
