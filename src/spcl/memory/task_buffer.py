"""Storage for the samples of one task."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs, from_leaves, leaves, map_leaves

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

    def allocate(self, x: Inputs, y: Tensor) -> None:
        """Create fields for inputs like ``x``, which has no samples, and targets like ``y``, unless there are some.

        Targets are on the host.
        """
        self.fields = self.fields or input_fields(x) | {"y": torch.empty((0, *y.shape[1:]), dtype=y.dtype)}

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

    def retain(self, kept: NDArray[np.bool_], batch: Mapping[str, Tensor]) -> Callable[[], None]:
        """Keep the samples in the mask ``kept`` and evict the others; kept candidates come from ``batch``.

        Only the metadata changes at once. Returns what copies the samples themselves, which must follow before they are
        read; as long as it has not been called, the change can be undone by setting :attr:`metadata` back.
        """
        size, source = self.size, _layout(kept, self.size)
        self.ranks, self.labels, self.edits = self.ranks[source], self.labels[source], self.edits[source]
        self.size = len(source)
        return partial(self._rearrange, source, size, batch)

    @property
    def metadata(self) -> tuple[Any, ...]:
        """What is known of the samples: their number, labels, ranks and edits."""
        return self.size, self.labels, self.ranks, self.edits

    @metadata.setter
    def metadata(self, metadata: tuple[Any, ...]) -> None:
        self.size, self.labels, self.ranks, self.edits = metadata

    def _rearrange(self, source: NDArray[np.int64], size: int, batch: Mapping[str, Tensor]) -> None:
        """Copy samples to their slots, given the old slot of each; those from ``size`` on are samples of the batch."""
        slots = np.arange(len(source))
        if len(source) == size and (source == slots).all():  # every sample stays where it is
            return
        moved = slots[(source < size) & (source != slots)]
        new = slots[source >= size]
        if len(moved):
            for name in self.fields:
                self.overwrite(name, moved, self.take(name, source[moved]))
        self._resize(len(source))
        if len(new):
            self._put(new, batch, source[new] - size)
        self._update_nbytes()

    def take(self, name: str, slots: NDArray[np.int64]) -> Tensor:
        """Return a copy of the samples ``slots`` of a field."""
        return _select(self.fields[name], slots)

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
        return map_leaves(lambda field: _select(field, slots), inputs)

    def overwrite(self, name: str, slots: NDArray[np.int64] | Tensor, samples: Tensor) -> None:
        """Replace the samples ``slots`` of a field."""
        field = self.fields[name]
        samples = samples.detach().to(field.device, field.dtype, non_blocking=field.is_cuda)
        field.index_copy_(0, _index(slots, field), samples)

    @torch.no_grad()
    def store_logits(self, model: Callable[[Inputs], Tensor]) -> None:
        """Store the logits of ``model`` for every sample."""
        batches = -(-self.size // BATCH_SIZE)
        for first in range(batches):
            slots = np.arange(first, self.size, batches)  # of all classes, in whatever order they are stored
            self.overwrite("logits", slots, self._same_width(model(self.take_inputs(slots))))
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

    def _resize(self, size: int) -> None:
        """Reallocate fields whose capacity is not between ``size`` and ``2 * size`` samples."""
        for name, field in self.fields.items():
            if not size <= len(field) <= 2 * size:
                capacity = max(size, 2 * len(field)) if len(field) < size else size
                resized = field.new_empty((capacity, *field.shape[1:]))
                resized[: len(field)] = field[:capacity]
                self.fields[name] = resized

    def _put(self, slots: NDArray[np.int64], batch: Mapping[str, Tensor], chosen: NDArray[np.int64]) -> None:
        """Copy the chosen samples of the batch to slots; a GPU gets both numbers of each in one transfer."""
        pairs = np.stack([slots, chosen])
        for name, samples in batch.items():
            targets, sources = _index(pairs, samples).unbind()
            values = samples.detach().index_select(0, sources)
            self.overwrite(name, targets, self._same_width(values) if name == "logits" else values)
        if "logits" in self.fields and "logits" not in batch:
            self.fields["logits"].index_fill_(0, _index(slots, self.fields["logits"]), math.nan)

    def _same_width(self, logits: Tensor) -> Tensor:
        """Widen the stored or the new logits to the same number of classes, with NaN for classes added later."""
        field = self.fields.get("logits")
        if field is None:
            inputs = next(field for name, field in self.fields.items() if name != "y")
            field = logits.new_full((len(inputs), *logits.shape[1:]), math.nan, device=inputs.device)
        width = max((*field.shape[1:2], *logits.shape[1:2]), default=0)
        self.fields["logits"] = _widened(field, width)
        return _widened(logits, width)


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


def _index(indices: NDArray[np.int64] | Tensor, tensor: Tensor) -> Tensor:
    indices = indices if isinstance(indices, Tensor) else torch.from_numpy(indices)
    return indices.to(tensor.device, non_blocking=tensor.is_cuda)


def _select(tensor: Tensor, indices: NDArray[np.int64]) -> Tensor:
    return tensor.detach().index_select(0, _index(indices, tensor))


def _widened(logits: Tensor, width: int) -> Tensor:
    if logits.ndim == 1 or logits.shape[1] == width:
        return logits
    wide = logits.new_full((len(logits), width, *logits.shape[2:]), math.nan)
    wide[:, : logits.shape[1]] = logits
    return wide
