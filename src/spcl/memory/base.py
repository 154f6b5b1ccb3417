"""What every rehearsal memory shares: storing, drawing and saving; only the choice of samples is left to a policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.errors import CheckpointError, SpclError, TaskError
from spcl.memory.task_buffer import TaskBuffer

__all__ = ["Memory", "ReplayBatch"]


@dataclass(frozen=True)
class ReplayBatch:
    """The samples of one task in a drawn batch.

    Attributes:
        task: the task's name.
        x: inputs.
        y: targets.
        logits: the model's logits when the samples were stored, NaN where a class did not exist yet; ``None`` where the
            task's samples have none.
        slots: where the samples lie in the memory, until it next changes.
        edits: how often the inputs of each sample were replaced.
    """

    task: str
    x: Tensor
    y: Tensor
    logits: Tensor | None
    slots: Tensor
    edits: Tensor


class Memory(ABC):
    """A rehearsal memory of at most ``budget`` replayable samples.

    Samples are kept task by task in the data's own type and drawn uniformly.
    Every sample gets a *rank* when it arrives, by default a random one, and a policy keeps those of the lowest ranks:
    the ``k`` lowest of ``n`` random ranks are a uniform sample of size ``k``, whatever ``n`` and however often ``k``
    has shrunk. A policy is one method, :meth:`choose`; it may also replace :meth:`rank` and :meth:`replayable`.

    >>> class NewestOfEachTask(Memory):
    ...     def rank(self, arrivals):
    ...         return -arrivals.astype(float)
    ...
    ...     def choose(self):
    ...         share = self.budget // len(self.buffers)
    ...         return {task: buffer.ranks.argsort().argsort() < share for task, buffer in self.buffers.items()}
    >>> memory = NewestOfEachTask(4)
    >>> for task, first in ("a", 0), ("b", 10):
    ...     memory.start(task, classes=2)
    ...     memory.observe(task, torch.arange(first, first + 5), torch.tensor([0, 1, 0, 1, 1]))
    >>> [(rehearsal.task, sorted(rehearsal.x.tolist())) for rehearsal in memory.draw(8)]
    [('a', [3, 4]), ('b', [13, 14])]

    Args:
        budget: how many samples may be replayed from.
        seed: of the memory's own generator.
        device: where inputs and logits are kept, by default where they came from; targets are kept on the host.
        dtype: the type inputs are kept in; their own by default. Methods that edit inputs need a floating-point one.

    Attributes:
        buffers: the samples of every task, in the order in which tasks started.
        seen: how many samples have been observed.
    """

    def __init__(
        self,
        budget: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(budget, int) or budget < 1:
            raise SpclError(f"a memory needs a budget of at least 1 sample, not {budget!r}")
        self.budget = budget
        self.device = None if device is None else torch.device(device)
        self.dtype = dtype
        self.generator = np.random.default_rng(seed)
        self.buffers: dict[str, TaskBuffer] = {}
        self.seen = 0

    @abstractmethod
    def choose(self) -> dict[str, NDArray[np.bool_]]:
        """Say which samples stay, by a mask over ``buffer.ranks``; tasks without a mask keep all.

        Called whenever samples have arrived or a task has ended; must leave at most ``budget`` replayable samples.
        """

    def rank(self, arrivals: NDArray[np.int64]) -> NDArray[np.float64]:
        """Rank new samples, given how many were seen before each of them; the lowest ranks stay longest."""
        return self.generator.random(len(arrivals))

    def replayable(self, buffer: TaskBuffer) -> bool:
        """Say whether the samples of a task may be drawn; the others are candidates outside the budget."""
        return True

    def start(self, task: str, classes: int | None) -> None:
        """Begin to keep samples of ``task``, which has this many classes (``None``: it is no classification task)."""
        if task in self.buffers:
            raise TaskError(f"memory already holds a task {task!r}: give the new task another name")
        if classes is not None and classes < 1:
            raise TaskError(f"task {task!r} has {classes} classes: it needs at least 1, or None if it has no classes")
        self.buffers[task] = TaskBuffer(classes)

    def check(self, task: str, x: Tensor, y: Tensor) -> None:
        """Raise :class:`~spcl.errors.TaskError` if samples do not fit their task; change nothing."""
        buffer = self._running(task)
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
            raise TaskError(
                f"task {task!r}: x ({_kind(x)}) and y ({_kind(y)}) must be equally many samples, at least 1"
            )
        for name, rows, dtype in ("x", x, self.dtype or x.dtype), ("y", y, y.dtype):
            stored = buffer.fields.get(name)
            if stored is not None and (stored.shape[1:], stored.dtype) != (rows.shape[1:], dtype):
                raise TaskError(f"task {task!r}: {name} ({_kind(rows)}) does not fit the memory's ({_kind(stored)})")
        if buffer.labelled:
            _check_labels(task, y, buffer)

    def observe(self, task: str, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        """Offer a training batch of a running task to the memory, perhaps with the model's logits for it."""
        self.check(task, x, y)
        if logits is not None and len(logits) != len(x):
            raise TaskError(f"task {task!r}: {len(logits)} logits ({_kind(logits)}) for {len(x)} samples")
        buffer = self.buffers[task]
        buffer.prepare("x", x, self.device, self.dtype)
        buffer.prepare("y", y, torch.device("cpu"), None)
        buffer.offer(self.rank(np.arange(self.seen, self.seen + len(x))), buffer.labels_of(y))
        self.seen += len(x)
        self._settle(task, {"x": x, "y": y} if logits is None else {"x": x, "y": y, "logits": logits})

    def finish(self, task: str, describe: Callable[[Tensor], Tensor] | None = None) -> None:
        """Stop keeping samples of ``task``; ``describe`` gives the present model's logits for inputs.

        Whether ``describe`` is used is up to the policy; here it is not.
        """
        self._running(task).running = False
        self._settle(task, {})

    def draw(self, count: int) -> list[ReplayBatch]:
        """Draw ``count`` samples (or all, if there are fewer) uniformly without replacement, grouped by task."""
        buffers = {task: buffer for task, buffer in self.buffers.items() if self.replayable(buffer) and buffer.size}
        if not buffers:
            return []
        starts = np.cumsum([0, *(buffer.size for buffer in buffers.values())])
        chosen = np.sort(self.generator.choice(starts[-1], min(count, starts[-1]), replace=False, shuffle=False))
        groups = np.split(chosen, np.searchsorted(chosen, starts[1:-1]))
        drawn = zip(buffers, groups, starts[:-1], strict=True)
        return [self._rehearsal(task, rows - start) for task, rows, start in drawn if len(rows)]

    def replace(self, rehearsal: ReplayBatch, x: Tensor) -> None:
        """Write edited inputs back to where they were drawn from, before any further sample is observed."""
        if (x.shape, x.dtype) != (rehearsal.x.shape, rehearsal.x.dtype):
            raise TaskError(
                f"task {rehearsal.task!r}: edited x ({_kind(x)}) does not fit the memory's ({_kind(rehearsal.x)}); "
                "build the memory with the dtype in which inputs are edited"
            )
        buffer, slots = self.buffers[rehearsal.task], rehearsal.slots.numpy()
        buffer.overwrite("x", slots, x)
        buffer.edits[slots] += 1

    def __len__(self) -> int:
        """Count the replayable samples."""
        return sum(buffer.size for buffer in self.buffers.values() if self.replayable(buffer))

    def counts(self) -> dict[str, list[int]]:
        """Count the replayable samples of every task, class by class."""
        return {
            task: np.bincount(buffer.labels, minlength=buffer.classes).tolist()
            for task, buffer in self.buffers.items()
            if self.replayable(buffer)
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all stored samples: inputs, targets and logits, candidates included."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data; the tensors are views of the stored ones."""
        return {
            "policy": type(self).__name__,
            "budget": self.budget,
            "seen": self.seen,
            "generator": self.generator.bit_generator.state,
            "tasks": [{"name": task, **buffer.state_dict()} for task, buffer in self.buffers.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where a memory of the same policy and budget was; its tensors are copied."""
        if (state["policy"], state["budget"]) != (type(self).__name__, self.budget):
            raise CheckpointError(
                f"the saved memory is a {state['policy']} of {state['budget']} samples, this one a "
                f"{type(self).__name__} of {self.budget}: build the memory as it was saved"
            )
        self.seen = state["seen"]
        self.generator.bit_generator.state = state["generator"]
        self.buffers = {task["name"]: TaskBuffer.from_state_dict(task, self.device) for task in state["tasks"]}

    def _running(self, task: str) -> TaskBuffer:
        if task not in self.buffers:
            raise TaskError(
                f"memory knows no task {task!r}: start it first; known: {', '.join(self.buffers) or 'none'}"
            )
        if not self.buffers[task].running:
            raise TaskError(f"task {task!r} is finished: memory takes no more samples of it")
        return self.buffers[task]

    def _settle(self, task: str, batch: Mapping[str, Tensor]) -> None:
        kept = self.choose()
        for name, buffer in self.buffers.items():
            mask = kept.get(name)
            if name == task:
                buffer.retain(np.ones(len(buffer.ranks), dtype=bool) if mask is None else mask, batch)
            elif mask is not None and not mask.all():
                buffer.retain(mask, {})
        if len(self) > self.budget:
            raise SpclError(
                f"{type(self).__name__}.choose left {len(self)} replayable samples in a memory of {self.budget}: "
                f"its masks must leave at most {self.budget} of all tasks together"
            )

    def _rehearsal(self, task: str, slots: NDArray[np.int64]) -> ReplayBatch:
        buffer = self.buffers[task]
        logits = buffer.take("logits", slots) if "logits" in buffer.fields else None
        return ReplayBatch(
            task,
            x=buffer.take("x", slots),
            y=buffer.take("y", slots),
            logits=logits,
            slots=torch.from_numpy(slots),
            edits=torch.from_numpy(buffer.edits[slots]),
        )


def _kind(rows: Tensor) -> str:
    return f"shape {tuple(rows.shape)}, {rows.dtype}"


def _check_labels(task: str, y: Tensor, buffer: TaskBuffer) -> None:
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TaskError(f"task {task!r}: labels ({_kind(y)}) must be one whole number per sample")
    labels = buffer.labels_of(y)
    outside = labels[(labels < 0) | (labels >= buffer.classes)]
    if len(outside):
        raise TaskError(f"task {task!r}: label {outside[0]} is outside 0 … {buffer.classes - 1}")
