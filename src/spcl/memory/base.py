"""The base class of replay memories: storing, drawing and saving samples; subclasses choose which to keep."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs, map_leaves, number_of_samples, sample_kind
from spcl.errors import CheckpointError, SpclError, TaskError
from spcl.memory.checks import check_labels, kind_of
from spcl.memory.replay_batch import DrawAhead, ReplayBatch, replay_batches
from spcl.memory.task_buffer import TaskBuffer, input_fields

__all__ = ["Memory"]


class Memory(ABC):
    """A replay memory of at most ``budget`` replayable samples.

    Samples are stored per task in the data's dtype and drawn uniformly.
    Every observed sample gets a *rank*, by default a random one, and a policy keeps those of the lowest ranks:
    the ``k`` lowest of ``n`` random ranks are a uniform sample of size ``k``, for any ``n`` and however often ``k``
    has shrunk. A policy implements :meth:`choose`; it may also override :meth:`rank`, :meth:`replayable` and
    :meth:`pick`.

    With ``draws_ahead = True`` a class says of itself, not of its subclasses, that a learner on a GPU may make the next
    draw before other calls and undo it: then draws depend on :meth:`draw_state` and the stored samples alone.

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
    >>> [(batch.task, sorted(batch.x.tolist())) for batch in memory.draw(8)]
    [('a', [3, 4]), ('b', [13, 14])]

    Args:
        budget: the largest number of replayable samples.
        seed: of the memory's own random generator.
        device: where inputs and logits are stored, by default the device of the batches; targets are on the host.
        dtype: the dtype in which inputs are stored, by default their own. Methods that edit inputs need a floating one.
            Of dicts and tuples it applies to the floating-point parts only, as others may be tokens or masks.

    Attributes:
        buffers: the samples of every task, in the order in which tasks started.
        seen: the number of samples observed.
    """

    draws_ahead: ClassVar[bool] = False

    def __init__(
        self,
        budget: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(budget, int) or budget < 1:
            raise SpclError(f"the budget of the memory is {budget!r}; give a budget of at least 1 sample")
        self.budget = budget
        self.device = None if device is None else torch.device(device)
        self.dtype = dtype
        self.generator = np.random.default_rng(seed)
        self.buffers: dict[str, TaskBuffer] = {}
        self.seen = 0
        self._before: tuple[int, Any] | None = None
        self._ahead: deque[DrawAhead] = deque()

    @abstractmethod
    def choose(self) -> dict[str, NDArray[np.bool_]]:
        """Return which samples to keep, as a mask over ``buffer.ranks`` for each task; tasks without a mask keep all.

        Called after every :meth:`observe` and :meth:`finish`; must leave at most ``budget`` replayable samples.
        """

    def rank(self, arrivals: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the ranks of new samples, given how many were seen before each; the lowest ranks are kept longest."""
        return self.generator.random(len(arrivals))

    def replayable(self, buffer: TaskBuffer) -> bool:
        """Return whether the samples of a task may be drawn; others are candidates, which the budget does not count."""
        return True

    def draws_from(self, buffer: TaskBuffer) -> bool:
        """Return whether there are samples of a task that may be drawn."""
        return bool(buffer.size) and self.replayable(buffer)

    def start(self, task: str, classes: int | None) -> None:
        """Start to keep samples of ``task``, which has this many classes (``None``: not a classification task)."""
        if task in self.buffers:
            raise TaskError(f"memory already holds a task {task!r}; give the new task another name")
        if classes is not None and classes < 1:
            raise TaskError(f"task {task!r} has {classes} classes; give at least 1, or None if it has no classes")
        self.buffers[task] = TaskBuffer(classes)

    def check(self, task: str, x: Inputs, y: Tensor) -> None:
        """Raise :class:`~spcl.errors.TaskError` if samples do not fit their task; change nothing."""
        self.check_kind(task, x, y)
        if self.buffers[task].labelled:
            check_labels(task, y, self.buffers[task])

    def check_kind(self, task: str, x: Inputs, y: Tensor) -> None:
        """Raise :class:`~spcl.errors.TaskError` if samples are not of their task's kind; labels are not looked at."""
        buffer = self._running(task)
        if y.ndim == 0 or not number_of_samples(x) == y.shape[0] > 0:
            raise TaskError(
                f"task {task!r}: x ({kind_of(x)}) and y ({kind_of(y)}) must have the same number of samples, at least 1"
            )
        kind = sample_kind(x), sample_kind(y)
        if buffer.fields and kind != buffer.known_kind:
            self._check_like_stored(task, x, y, buffer)
            buffer.known_kind = kind

    def _check_like_stored(self, task: str, x: Inputs, y: Tensor, buffer: TaskBuffer) -> None:
        """Refuse samples of another kind than those that are stored."""
        fields = {name: field[: buffer.size] for name, field in buffer.fields.items()}
        stored, targets = buffer.inputs_of(fields), fields["y"]
        if sample_kind(stored) != self._stored_kind(x):
            raise TaskError(f"task {task!r}: x ({kind_of(x)}) does not fit the memory's ({kind_of(stored)})")
        if sample_kind(targets) != sample_kind(y):
            raise TaskError(f"task {task!r}: y ({kind_of(y)}) does not fit the memory's ({kind_of(targets)})")

    def observe(self, task: str, x: Inputs, y: Tensor, logits: Tensor | None = None) -> None:
        """Add a training batch of a running task, optionally with the model's logits, and evict beyond the budget."""
        self.check(task, x, y)
        if logits is not None and len(logits) != len(y):
            raise TaskError(
                f"task {task!r}: {len(logits)} logits ({kind_of(logits)}) for {len(y)} samples; give one row per sample"
            )
        self._cancel_draws()
        buffer = self.buffers[task]
        if not buffer.fields:
            buffer.allocate(self._no_samples(x), y)
        buffer.add_candidates(self.rank(np.arange(self.seen, self.seen + len(y))), buffer.labels_of(y))
        self.seen += len(y)
        batch = input_fields(x) | {"y": y}
        self._evict(task, batch if logits is None else batch | {"logits": logits})

    def begin(self) -> None:
        """Remember the samples, so that what changes can be undone by :meth:`rollback`, until :meth:`commit`.

        A learner stores new samples while a GPU computes; no task finishes before it is known whether all is finite.

        >>> from spcl.memory import Reservoir
        >>> memory = Reservoir(2)
        >>> memory.start("a", classes=2)
        >>> memory.begin()
        >>> memory.observe("a", torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]))
        >>> memory.rollback()
        >>> len(memory), memory.seen
        (0, 0)
        >>> memory.commit()
        """
        self._before = self.seen, self._ahead[0].before if self._ahead else self.draw_state()
        for buffer in self.buffers.values():
            buffer.begin()

    def commit(self) -> None:
        """Keep what has changed since :meth:`begin`."""
        self._before = None
        for buffer in self.buffers.values():
            buffer.commit()

    def rollback(self, draws: bool = True) -> None:
        """Undo what has changed since :meth:`begin`, from where it may change again.

        If ``draws``, the same samples will be drawn as before, otherwise others.
        """
        self._cancel_draws()
        if self._before is None:
            return
        self.seen, state = self._before
        if draws:
            self.restore_draws(state)
        for buffer in self.buffers.values():
            buffer.rollback()

    def finish(self, task: str, model: Callable[[Inputs], Tensor] | None = None) -> None:
        """Stop adding samples of ``task``.

        Policies may store the logits that ``model`` gives for the task's inputs; the base class does not.
        """
        self.check_finish(task)
        self._cancel_draws()
        self.buffers[task].running = False
        self._evict(task, {})

    def check_finish(self, task: str) -> None:
        """Raise :class:`~spcl.errors.TaskError` if ``task`` cannot finish now; change nothing."""
        self._running(task)
        if self._before is not None:
            raise TaskError(f"task {task!r} cannot finish within a step; finish it when the step has returned")

    def draw(self, count: int) -> list[ReplayBatch]:
        """Draw ``count`` samples (or all, if there are fewer), grouped by task.

        They are drawn uniformly without replacement, unless a policy overrides :meth:`pick`.
        """
        if self._ahead and self._ahead[0].count == count:
            return self._ahead.popleft().batches
        self._cancel_draws()
        return self._draw(count)

    def draw_ahead(self, count: int) -> None:
        """Make the next draw now, for :meth:`draw` to return; undone if memory changes or another count is drawn.

        >>> from spcl.memory import Reservoir
        >>> one, other = Reservoir(9, seed=0), Reservoir(9, seed=0)
        >>> for memory in (one, other):
        ...     memory.start("a", classes=None)
        ...     memory.observe("a", torch.arange(9), torch.arange(9))
        >>> one.draw_ahead(4)
        >>> torch.equal(one.draw(4)[0].x, other.draw(4)[0].x)
        True
        """
        self._ahead.append(DrawAhead(count, self.draw_state(), self._draw(count)))

    def _cancel_draws(self) -> None:
        """Undo the draws that were made ahead."""
        if self._ahead:
            before = self._ahead[0].before
            self._ahead.clear()
            self.restore_draws(before)

    def _draw(self, count: int) -> list[ReplayBatch]:
        buffers = {task: buffer for task, buffer in self.buffers.items() if self.draws_from(buffer)}
        if not buffers:
            return []
        starts = [0, *accumulate(buffer.size for buffer in buffers.values())]
        chosen = np.sort(self.pick(starts[-1], count))
        bounds = np.searchsorted(chosen, starts).tolist()
        parts = zip(buffers, starts, bounds, bounds[1:], strict=False)
        return replay_batches(buffers, {task: chosen[a:b] - start for task, start, a, b in parts if a < b})

    def pick(self, size: int, count: int) -> NDArray[np.int64]:
        """Return the positions of the samples of one draw among ``size`` replayable ones.

        A policy that keeps more than the generator's state for it overrides :meth:`draw_state` and
        :meth:`restore_draws`, too, since draws are undone.
        """
        return self.generator.choice(size, min(count, size), replace=False, shuffle=False)

    def draw_state(self) -> Any:
        """Return the state that drawing changes, for draws that are undone."""
        return self.generator.bit_generator.state

    def restore_draws(self, state: Any) -> None:
        """Restore from :meth:`draw_state`."""
        self.generator.bit_generator.state = state

    def replace(self, batch: ReplayBatch, x: Inputs) -> None:
        """Replace the inputs of drawn samples; call it before the next :meth:`observe` or :meth:`finish`."""
        if sample_kind(x) != sample_kind(batch.x) or number_of_samples(x) != len(batch.y):
            raise TaskError(
                f"task {batch.task!r}: edited x ({kind_of(x)}) does not fit the memory's ({kind_of(batch.x)}); "
                "build the memory with the dtype in which inputs are edited"
            )
        self._cancel_draws()
        self.buffers[batch.task].replace(batch.slots.numpy(), input_fields(x))

    def __len__(self) -> int:
        """Return the number of replayable samples."""
        return sum([buffer.size for buffer in self.buffers.values() if self.replayable(buffer)])

    def counts(self) -> dict[str, list[int]]:
        """Return the number of replayable samples of every task and class."""
        return {
            task: np.bincount(buffer.labels, minlength=buffer.classes).tolist()
            for task, buffer in self.buffers.items()
            if self.replayable(buffer)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all stored samples: inputs, targets and logits, including candidates."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; the samples are copies."""
        self._cancel_draws()
        return {
            "policy": type(self).__name__,
            "budget": self.budget,
            "seen": self.seen,
            "generator": self.generator.bit_generator.state,
            "tasks": [{"name": task, **buffer.state_dict()} for task, buffer in self.buffers.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from the :meth:`state_dict` of a memory of the same policy and budget; tensors are copied."""
        if (state["policy"], state["budget"]) != (type(self).__name__, self.budget):
            raise CheckpointError(
                f"the saved memory is a {state['policy']} of {state['budget']} samples, this one a "
                f"{type(self).__name__} of {self.budget}; build the memory as it was saved"
            )
        self._ahead.clear()
        self._before = None
        self.seen = state["seen"]
        self.generator.bit_generator.state = state["generator"]
        self.buffers = {task["name"]: TaskBuffer.from_state_dict(task, self.device) for task in state["tasks"]}

    def _no_samples(self, x: Inputs) -> Inputs:
        """Return a batch without samples, in the type and on the device in which samples like ``x`` are stored."""

        def empty(leaf: Tensor) -> Tensor:
            converted = isinstance(x, Tensor) or leaf.is_floating_point()
            dtype = self.dtype if converted and self.dtype is not None else leaf.dtype
            return torch.empty((0, *leaf.shape[1:]), dtype=dtype, device=self.device or leaf.device)

        return map_leaves(empty, x)

    def _stored_kind(self, x: Inputs) -> Hashable:
        return sample_kind(x if self.dtype is None else self._no_samples(x))

    def _running(self, task: str) -> TaskBuffer:
        if task not in self.buffers:
            raise TaskError(
                f"memory has no task {task!r} (its tasks: {', '.join(self.buffers) or 'none'}); start the task first"
            )
        if not self.buffers[task].running:
            raise TaskError(f"task {task!r} is finished; memory accepts samples of running tasks only")
        return self.buffers[task]

    def _evict(self, task: str, batch: Mapping[str, Tensor]) -> None:
        """Store the chosen samples of ``batch`` and evict all samples that the policy does not choose."""
        kept = self.choose()
        buffer, mask = self.buffers[task], kept.pop(task, None)
        buffer.retain(np.ones(len(buffer.ranks), dtype=bool) if mask is None else mask, batch)
        for name, mask in kept.items():
            if not mask.all():
                self.buffers[name].retain(mask, {})
        if len(self) > self.budget:
            raise SpclError(
                f"{type(self).__name__}.choose left {len(self)} replayable samples in a memory of {self.budget}; "
                f"its masks must leave at most {self.budget} over all tasks"
            )
