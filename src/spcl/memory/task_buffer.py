"""Storage for the samples of one task."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs, from_leaves, leaves, map_leaves

__all__ = ["TaskBuffer", "input_fields"]

BATCH_SIZE = 256  # samples per call of the model in `store_logits`


class TaskBuffer:
    """The samples of one task, in the rows of tensors with room for more: ``x``, ``y`` and optionally ``logits``.

    Inputs that are a dict or tuple of tensors have a field for each, e.g. ``x.tokens`` or ``x[0]``.

    Samples are in any order there: read them by :meth:`take`, not from the fields. New and edited samples get rows that
    hold none, neither now nor before :meth:`begin`: what changes since then can be undone without copies, and copies
    can be made at once.

    The metadata used to choose samples is on the host, so that choosing does not synchronize with an accelerator:
    ``labels``, ``ranks`` and ``edits`` (how often a sample's inputs were replaced) have one entry per stored sample,
    followed by those of candidates that are not stored yet (:meth:`add_candidates`).
    :meth:`retain` stores the chosen candidates and evicts the samples that were not chosen.

    Attributes:
        classes: number of classes of the task; a task without classes counts as one class.
        labelled: whether the task has classes, so that ``y`` holds labels.
        running: whether the task still gets samples.
        rows: the row of every stored sample.
        nbytes: bytes of all stored samples.
        known_kind: the kind of the last batch that was found to fit the stored samples.
    """

    def __init__(self, classes: int | None) -> None:
        self.classes = 1 if classes is None else classes
        self.labelled = classes is not None
        self.running = True
        self.rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.labels: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.ranks: NDArray[np.float64] = np.empty(0)
        self.edits: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.fields: dict[str, Tensor] = {}
        self.nbytes = 0
        self.known_kind: object = None
        self._before: _Content | None = None

    @property
    def size(self) -> int:
        """The number of stored samples."""
        return len(self.rows)

    # -- changes that can be undone

    def begin(self) -> None:
        """Remember the samples, for :meth:`rollback`, until :meth:`commit`."""
        content = self.rows, self.labels, self.ranks, self.edits, self.fields, self.nbytes, self.known_kind
        self._before = _Content(*content)

    def commit(self) -> None:
        """Forget the samples that were evicted since :meth:`begin`."""
        self._before = None

    def rollback(self) -> None:
        """Restore the samples of :meth:`begin`, from where they may change again."""
        if self._before is not None:
            self.rows, self.labels, self.ranks, self.edits, self.fields, self.nbytes, self.known_kind = self._before

    # -- storing

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

    def retain(self, kept: NDArray[np.bool_], batch: Mapping[str, Tensor]) -> None:
        """Keep the samples in the mask ``kept`` and evict the others; kept candidates come from ``batch``."""
        source = _layout(kept, self.size)
        self.ranks, self.labels, self.edits = self.ranks[source], self.labels[source], self.edits[source]
        is_new = source >= self.size
        chosen = source[is_new] - self.size
        free, rows = self._free_rows(len(chosen)), np.empty_like(source)
        rows[is_new], rows[~is_new] = free, self.rows[source[~is_new]]
        self.rows = rows
        if len(chosen):
            self._put(free, batch, chosen)
        elif not batch:
            self._shrink()
        self._update_nbytes()

    def replace(self, positions: NDArray[np.int64], inputs: Mapping[str, Tensor]) -> None:
        """Replace the inputs of samples, and count their edits."""
        old, new = self.rows[positions], self._free_rows(len(positions))
        for name, field in self.fields.items():
            self._write(name, new, inputs[name] if name in inputs else _select(field, old))
        self.rows, self.edits = self.rows.copy(), self.edits.copy()  # the old arrays remain for a rollback
        self.rows[positions] = new
        self.edits[positions] += 1

    @torch.no_grad()
    def store_logits(self, model: Callable[[Inputs], Tensor]) -> None:
        """Store the logits of ``model`` for every sample."""
        batches = -(-self.size // BATCH_SIZE)
        for first in range(batches):
            positions = np.arange(first, self.size, batches)  # of all classes, in whatever order they are stored
            logits = self._same_width(model(self.take_inputs(positions)))
            self._write("logits", self.rows[positions], logits)
        self._update_nbytes()

    # -- reading

    def take(self, name: str) -> Tensor:
        """Return a copy of a field: all samples, in order."""
        return _select(self.fields[name], self.rows)

    def take_inputs(self, positions: NDArray[np.int64]) -> Inputs:
        """Return a copy of the inputs of the samples at ``positions``."""
        rows = self.rows[positions]
        return map_leaves(lambda field: _select(field, rows), self.inputs_of(self.fields))

    @staticmethod
    def inputs_of(fields: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs among fields, in the form in which they were observed."""
        if "x" in fields:
            return fields["x"]
        return from_leaves({name[1:]: field for name, field in fields.items() if name.startswith(("x.", "x["))})

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; the samples are copies."""
        return {
            "classes": self.classes if self.labelled else None,
            "running": self.running,
            "ranks": torch.from_numpy(self.ranks),
            "edits": torch.from_numpy(self.edits),
            "fields": {name: self.take(name) for name in self.fields},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | None) -> "TaskBuffer":
        """Restore a buffer from :meth:`state_dict`, with inputs and logits on ``device`` (None: unchanged)."""
        buffer = cls(state["classes"])
        buffer.running = state["running"]
        buffer.ranks = state["ranks"].cpu().numpy().copy()
        buffer.edits = state["edits"].cpu().numpy().copy()
        buffer.rows = np.arange(len(buffer.ranks))
        devices = {"y": torch.device("cpu")}
        buffer.fields = {name: f.to(devices.get(name, device), copy=True) for name, f in state["fields"].items()}
        if buffer.fields:
            buffer.labels = buffer.labels_of(buffer.fields["y"])
        buffer._update_nbytes()
        return buffer

    # -- rows

    def _free_rows(self, count: int) -> NDArray[np.int64]:
        """Return rows that hold no sample, and none that :meth:`rollback` would need."""
        capacity = len(self.fields["y"]) if self.fields else 0
        is_free = np.ones(capacity, dtype=bool)
        is_free[self.rows] = False
        if self._before is not None and self._before.fields.get("y") is self.fields.get("y"):
            is_free[self._before.rows] = False
        free = np.flatnonzero(is_free)
        if len(free) < count:
            needed = capacity - len(free) + count
            self._allocate(needed + needed // 4)
            free = np.append(free, np.arange(capacity, needed))
        return free[:count]

    def _allocate(self, capacity: int) -> None:
        """Move the samples to tensors with more rows."""
        larger = {name: field.new_empty((capacity, *field.shape[1:])) for name, field in self.fields.items()}
        for name, field in self.fields.items():
            larger[name][: len(field)] = field
        self.fields = larger

    def _shrink(self) -> None:
        """Give rows back where most of them hold no sample."""
        if any(len(field) > 2 * self.size for field in self.fields.values()):
            self.fields = {name: self.take(name) for name in self.fields}
            self.rows = np.arange(self.size)

    def _update_nbytes(self) -> None:
        self.nbytes = sum([field.nbytes // len(field) * self.size for field in self.fields.values() if len(field)])

    def _put(self, rows: NDArray[np.int64], batch: Mapping[str, Tensor], chosen: NDArray[np.int64]) -> None:
        """Copy the chosen samples of the batch to rows; a GPU gets both numbers of each in one transfer."""
        pairs = np.stack([rows, chosen])
        for name, samples in batch.items():
            targets, sources = _index(pairs, samples).unbind()
            values = samples.detach().index_select(0, sources)
            self._write(name, targets, self._same_width(values) if name == "logits" else values)
        if "logits" in self.fields and "logits" not in batch:
            self.fields["logits"].index_fill_(0, _index(rows, self.fields["logits"]), math.nan)

    def _write(self, name: str, rows: NDArray[np.int64] | Tensor, samples: Tensor) -> None:
        field = self.fields[name]
        samples = samples.detach().to(field.device, field.dtype, non_blocking=field.is_cuda)
        field.index_copy_(0, _index(rows, field), samples)

    def _same_width(self, logits: Tensor) -> Tensor:
        """Widen the stored or the new logits to the same number of classes, with NaN for classes added later."""
        field = self.fields.get("logits")
        if field is None:
            inputs = next(field for name, field in self.fields.items() if name != "y")
            field = logits.new_full((len(inputs), *logits.shape[1:]), math.nan, device=inputs.device)
        width = max((*field.shape[1:2], *logits.shape[1:2]), default=0)
        self.fields = {**self.fields, "logits": _widened(field, width)}  # the old fields remain for a rollback
        return _widened(logits, width)


class _Content(NamedTuple):
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    ranks: NDArray[np.float64]
    edits: NDArray[np.int64]
    fields: dict[str, Tensor]
    nbytes: int
    known_kind: object


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
