"""Where the samples of one task lie."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TaskBuffer"]

DESCRIBED_AT_ONCE = 256


class TaskBuffer:
    """The samples of one task: growing tensors ``x``, ``y`` and perhaps ``logits``, in rows without gaps.

    What is needed to choose among samples lies on the host, so that choosing never waits for an accelerator: ``labels``
    and ``ranks`` have one entry per row, followed by those of newcomers that are not stored yet (:meth:`offer`); so has
    ``edits``, how often a row's inputs were replaced.
    :meth:`retain` stores the newcomers that were chosen and forgets the other rows.

    Attributes:
        classes: how many classes the task has; a task without classes counts as one class.
        labelled: whether the task has classes, that is, whether ``y`` holds labels.
        running: whether the task still gets samples.
        nbytes: the bytes of all stored rows.
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

    def prepare(self, name: str, like: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Make an empty field for rows such as those of ``like``, unless there is one."""
        if name not in self.fields:
            self.fields[name] = torch.empty(
                (0, *like.shape[1:]), dtype=dtype or like.dtype, device=device or like.device
            )

    def labels_of(self, y: Tensor) -> NDArray[np.int64]:
        """Bring the classes of targets ``y`` to the host."""
        if not self.labelled:
            return np.zeros(len(y), dtype=np.int64)
        return y.detach().cpu().numpy().astype(np.int64)

    def offer(self, ranks: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
        """Enter newcomers behind the stored rows."""
        self.ranks = np.concatenate([self.ranks, ranks])
        self.labels = np.concatenate([self.labels, labels])
        self.edits = np.concatenate([self.edits, np.zeros(len(ranks), dtype=np.int64)])

    def retain(self, kept: NDArray[np.bool_], batch: Mapping[str, Tensor]) -> None:
        """Keep the rows that ``kept`` marks; the newcomers among them are taken from ``batch``."""
        source = _layout(kept, self.size)
        slots = np.arange(len(source))
        moved = slots[(source < self.size) & (source != slots)]
        new = slots[source >= self.size]
        if len(moved):
            for name in self.fields:
                self.overwrite(name, moved, self.take(name, source[moved]))
        self._fit(len(source))
        if len(new):
            self._put(new, {name: _pick(rows, source[new] - self.size) for name, rows in batch.items()})
        self.ranks, self.labels, self.edits = self.ranks[source], self.labels[source], self.edits[source]
        self.size = len(source)
        self._weigh()

    def take(self, name: str, slots: NDArray[np.int64]) -> Tensor:
        """Copy the rows ``slots`` of a field."""
        return _pick(self.fields[name], slots)

    def overwrite(self, name: str, slots: NDArray[np.int64], rows: Tensor) -> None:
        """Put ``rows`` in the place of the rows ``slots`` of a field."""
        field = self.fields[name]
        rows = rows.detach().to(field.device, field.dtype, non_blocking=field.is_cuda)
        field.index_copy_(0, _index(slots, field), rows)

    @torch.no_grad()
    def describe(self, model: Callable[[Tensor], Tensor]) -> None:
        """Store the logits that ``model`` gives now for every row."""
        for start in range(0, self.size, DESCRIBED_AT_ONCE):
            slots = np.arange(start, min(start + DESCRIBED_AT_ONCE, self.size))
            self.overwrite("logits", slots, self._same_width(model(self.take("x", slots))))
        self._weigh()

    def _weigh(self) -> None:
        self.nbytes = sum([field.nbytes // len(field) * self.size for field in self.fields.values() if len(field)])

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data; the tensors are views of the stored ones."""
        return {
            "classes": self.classes if self.labelled else None,
            "running": self.running,
            "ranks": torch.from_numpy(self.ranks),
            "edits": torch.from_numpy(self.edits),
            "fields": {name: field[: self.size] for name, field in self.fields.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | None) -> "TaskBuffer":
        """Build the buffer whose state this is, its inputs and logits on ``device`` (default: where they are)."""
        buffer = cls(state["classes"])
        buffer.running = state["running"]
        buffer.ranks = state["ranks"].cpu().numpy().copy()
        buffer.edits = state["edits"].cpu().numpy().copy()
        buffer.size = len(buffer.ranks)
        places = {"y": torch.device("cpu")}
        buffer.fields = {name: f.to(places.get(name, device), copy=True) for name, f in state["fields"].items()}
        if buffer.fields:
            buffer.labels = buffer.labels_of(buffer.fields["y"])
        buffer._weigh()
        return buffer

    def _fit(self, size: int) -> None:
        """Give every field room for ``size`` rows, and for at most twice as many."""
        for name, field in self.fields.items():
            if not size <= len(field) <= 2 * size:
                room = max(size, 2 * len(field)) if len(field) < size else size
                fitted = field.new_empty((room, *field.shape[1:]))
                fitted[: len(field)] = field[:room]
                self.fields[name] = fitted

    def _put(self, slots: NDArray[np.int64], batch: Mapping[str, Tensor]) -> None:
        for name, rows in batch.items():
            self.overwrite(name, slots, self._same_width(rows) if name == "logits" else rows)
        if "logits" in self.fields and "logits" not in batch:
            self.fields["logits"].index_fill_(0, _index(slots, self.fields["logits"]), math.nan)

    def _same_width(self, logits: Tensor) -> Tensor:
        """Give the stored and the new logits the same number of classes, NaN where a class did not exist yet."""
        field = self.fields.get("logits")
        if field is None:
            room = len(self.fields["x"])
            field = logits.new_full((room, *logits.shape[1:]), math.nan, device=self.fields["x"].device)
        width = max((*field.shape[1:2], *logits.shape[1:2]), default=0)
        self.fields["logits"] = _widened(field, width)
        return _widened(logits, width)


def _layout(kept: NDArray[np.bool_], size: int) -> NDArray[np.int64]:
    """Say which row goes to every slot: stored rows stay where they are if they can, all others fill the gaps."""
    rows = np.flatnonzero(kept)
    source = np.arange(len(rows))
    stays = kept[: len(rows)] & (source < size)
    source[~stays] = rows[rows >= min(len(rows), size)]
    return source


def _index(rows: NDArray[np.int64], tensor: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(tensor.device, non_blocking=tensor.is_cuda)


def _pick(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    return tensor.detach().index_select(0, _index(rows, tensor))


def _widened(logits: Tensor, width: int) -> Tensor:
    if logits.ndim == 1 or logits.shape[1] == width:
        return logits
    wide = logits.new_full((len(logits), width, *logits.shape[2:]), math.nan)
    wide[:, : logits.shape[1]] = logits
    return wide
