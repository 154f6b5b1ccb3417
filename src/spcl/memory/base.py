"""Replay memories: storing, drawing and saving samples; subclasses choose which to keep."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl._util.registry import Registry
from spcl._util.validation import check_seed
from spcl.batches import Inputs, describe, from_leaves, kind_of_pair, leaves, map_leaves, number_of_samples, sample_kind
from spcl.errors import CheckpointError, SpclError, TaskError
from spcl.tasks import INTEGERS, check_targets


class Memory(ABC):
    """A replay memory of at most ``budget`` replayable samples.

    Samples are stored per source in the data's dtype and drawn uniformly.
    Every observed sample gets a *rank*, by default a random one, and a policy keeps the samples with the lowest ranks:
    the ``k`` lowest of ``n`` random ranks are a uniform sample of size ``k``, for any ``n`` and however often ``k``
    has shrunk. A policy implements :meth:`choose`; it may also override :meth:`rank`, :meth:`replayable` and
    :meth:`pick`.

    ``draws_ahead = True`` (not inherited: set it in each class) lets a GPU learner make the next draw early and undo
    it; draws may then depend only on :meth:`draw_state` and the stored samples.

    >>> class NewestOfEachSource(Memory):
    ...     def rank(self, arrivals):
    ...         return -arrivals.astype(float)
    ...
    ...     def choose(self):
    ...         share = self.budget // len(self.buffers)
    ...         return {source: buffer.ranks.argsort().argsort() < share for source, buffer in self.buffers.items()}
    >>> memory = NewestOfEachSource(4)
    >>> for source, first in ("a", 0), ("b", 10):
    ...     memory.start(source, classes=2)
    ...     memory.observe(source, torch.arange(first, first + 5), torch.tensor([0, 1, 0, 1, 1]))
    >>> [(batch.source, sorted(batch.x.tolist())) for batch in memory.draw(8)]
    [('a', [3, 4]), ('b', [13, 14])]

    Args:
        budget: the largest number of replayable samples.
        seed: of the memory's own random generator.
        device: where inputs and logits are stored, by default the device of the batches; targets are on the host.
        dtype: the dtype in which inputs are stored, by default their own. Methods that edit inputs need a floating one.
            In dicts and tuples it applies to floating-point parts only: others may be tokens or masks.

    Attributes:
        buffers: the samples of every source, in the order in which sources started.
        seen: the number of samples observed.
    """

    draws_ahead: ClassVar[bool] = False
    replays_running: ClassVar[bool] = True
    """Whether samples of running sources may be drawn, or only samples of finished sources."""
    keeps_observed_logits: ClassVar[bool] = True
    """Whether logits given to :meth:`observe` are stored."""

    def __init__(
        self,
        budget: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_budget(budget)
        check_seed(seed)
        self.budget = budget
        self.device = None if device is None else torch.device(device)
        self.dtype = dtype
        self.generator = np.random.default_rng(seed)
        self.buffers: dict[str, SourceBuffer] = {}
        self.seen = 0
        self._before: tuple[int, Any] | None = None
        self._ahead: deque[DrawAhead] = deque()

    @abstractmethod
    def choose(self) -> dict[str, NDArray[np.bool_]]:
        """Return which samples to keep, as a mask over ``buffer.ranks`` by source; sources without one keep all.

        Called after every :meth:`observe`, :meth:`finish` and :meth:`resize`; must leave at most ``budget`` replayable
        samples.
        """

    def rank(self, arrivals: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the ranks of new samples, given how many were seen before each; the lowest ranks are kept longest."""
        return self.generator.random(len(arrivals))

    def replayable(self, buffer: "SourceBuffer") -> bool:
        """Return whether a source's samples may be drawn; else they are candidates and do not count to the budget."""
        return self.replays_running or not buffer.running

    def replayable_sources(self) -> list[str]:
        """Return the names of the sources that have samples that may be drawn."""
        return [source for source, buffer in self.buffers.items() if buffer.size and self.replayable(buffer)]

    def resize(self, budget: int) -> None:
        """Keep at most ``budget`` replayable samples from now on; evict what is too much, as the policy chooses.

        >>> from spcl.memory import Reservoir
        >>> memory = Reservoir(4)
        >>> memory.start("a", classes=2)
        >>> memory.observe("a", torch.zeros(8, 1), torch.arange(8) % 2)
        >>> memory.resize(3)
        >>> len(memory)
        3
        """
        _check_budget(budget)
        self._cancel_draws()
        self.budget = budget
        for source in list(self.buffers)[:1]:
            self._evict(source, {})

    def start(self, source: str, classes: int | None, task: str | None = None) -> None:
        """Start to keep samples of a source, or go on with one that has ended.

        Args:
            source: its name.
            classes: the number of classes of its task; None if that is not a classification task.
            task: the name of the task, which sources may have in common; by default the source's own name.
        """
        task = source if task is None else task
        if classes is not None and classes < 1:
            raise TaskError(f"source {source!r} has {classes} classes; give at least 1, or None if it has no classes")
        known = self.buffers.get(source)
        if known is None:
            self.buffers[source] = SourceBuffer(classes, task)
            return
        if known.running:
            raise TaskError(f"memory already holds a source {source!r}; give the new source another name")
        if (known.task, known.classes if known.labelled else None) != (task, classes):
            raise TaskError(
                f"memory holds samples of source {source!r} for task {known.task!r} with {known.classes} classes, but "
                f"it starts again for task {task!r} with {classes}; give the new source another name"
            )
        self._cancel_draws()
        known.running = True

    def withdraw(self, source: str) -> None:
        """Forget a source that has brought no samples."""
        if source in self.buffers and not self.buffers[source].fields:
            del self.buffers[source]

    def add_classes(self, task: str, classes: int, added_at: int | None = None) -> None:
        """Let the sources of a task have this many classes from now on.

        Args:
            task: the name of the task.
            classes: the number of classes, old and new.
            added_at: where the new classes are among those that the stored logits of all tasks cover; None if stored
                logits cover the classes of one task.
        """
        self._cancel_draws()
        added = 0
        for buffer in self.buffers.values():
            if buffer.task == task and buffer.labelled:
                added, buffer.classes = classes - buffer.classes, classes
        for buffer in self.buffers.values() if added_at is not None and added else ():
            if buffer.labelled:
                buffer.insert_logits(added_at or 0, added)

    def check(self, source: str, x: Inputs, y: Tensor) -> None:
        """Raise :class:`~spcl.errors.TaskError` if samples do not fit their source; change nothing."""
        buffer = self._running(source)
        count, kind = kind_of_pair(x, y)
        if y.ndim == 0 or not count == y.shape[0] > 0:
            raise TaskError(
                f"source {source!r}: x ({describe(x)}) and y ({describe(y)}) must have the same number of samples, "
                f"at least 1"
            )
        if buffer.fields and kind != buffer.known_kind:
            fields = {name: field[:0] for name, field in buffer.fields.items()}
            stored, targets = buffer.inputs_of(fields), fields["y"]
            if sample_kind(stored) != sample_kind(x if self.dtype is None else self._no_samples(x)):
                raise TaskError(
                    f"source {source!r}: x ({describe(x, 1)}) does not fit the memory's ({describe(stored, 1)})"
                )
            if sample_kind(targets) != sample_kind(y):
                raise TaskError(
                    f"source {source!r}: y ({describe(y, 1)}) does not fit the memory's ({describe(targets, 1)})"
                )
            buffer.known_kind = kind
        if buffer.labelled:
            labels = y.to(torch.int64) if y.dtype in INTEGERS else y
            check_targets(f"source {source!r}", labels, "classification", buffer.classes)

    def observe(self, source: str, x: Inputs, y: Tensor, logits: Tensor | None = None) -> None:
        """Add a training batch of a running source, optionally with the model's logits, and evict beyond the budget."""
        self.check(source, x, y)
        if logits is not None and len(logits) != len(y):
            raise TaskError(f"source {source!r}: {len(logits)} logits for {len(y)} samples; give one row per sample")
        self._cancel_draws()
        buffer = self.buffers[source]
        if not buffer.fields:
            buffer.allocate(self._no_samples(x), y)
        buffer.add_candidates(self.rank(np.arange(self.seen, self.seen + len(y))), y)
        self.seen += len(y)
        batch = input_fields(x) | {"y": y}
        self._evict(source, batch | {"logits": logits} if logits is not None and self.keeps_observed_logits else batch)

    def begin(self) -> None:
        """Start a transaction: :meth:`rollback` returns to here until :meth:`commit`.

        A learner stores new samples before it knows whether the update is finite. No source may finish meanwhile.

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
        """End the transaction and keep its changes."""
        self._before = None
        for buffer in self.buffers.values():
            buffer.commit()

    def rollback(self, draws: bool = True) -> None:
        """Undo all changes since :meth:`begin`; the transaction stays open.

        If ``draws``, the generator is restored too, so that the same samples are drawn again.
        """
        self._cancel_draws()
        if self._before is None:
            return
        self.seen, state = self._before
        if draws:
            self.restore_draws(state)
        for buffer in self.buffers.values():
            buffer.rollback()

    def finish(self, source: str, model: Callable[[Inputs], Tensor] | None = None) -> None:
        """Stop adding samples of ``source``.

        Policies may store the logits that ``model`` gives for the source's inputs; the base class does not.
        """
        self.check_finish(source)
        self._cancel_draws()
        self.buffers[source].running = False
        self._evict(source, {})

    def check_finish(self, source: str) -> None:
        """Raise :class:`~spcl.errors.TaskError` if ``source`` cannot finish now; change nothing."""
        self._running(source)
        if self._before is not None:
            raise TaskError(f"source {source!r} cannot finish within a step; finish it when the step has returned")

    def draw(self, count: int) -> "list[ReplayBatch]":
        """Draw ``count`` samples (or all, if there are fewer), grouped by source.

        Draws are uniform without replacement, unless a policy overrides :meth:`pick`.
        """
        if self._ahead and self._ahead[0].count == count:
            return self._ahead.popleft().batches
        self._cancel_draws()
        return self._draw(count)

    def _cancel_draws(self) -> None:
        """Undo the draws that were made ahead."""
        if self._ahead:
            before = self._ahead[0].before
            self._ahead.clear()
            self.restore_draws(before)

    def _draw(self, count: int) -> "list[ReplayBatch]":
        buffers = {source: self.buffers[source] for source in self.replayable_sources()}
        if not buffers:
            return []
        starts = [0, *accumulate(buffer.size for buffer in buffers.values())]
        chosen = np.sort(self.pick(starts[-1], count))
        bounds = np.searchsorted(chosen, starts).tolist()
        parts = zip(buffers, starts, bounds, bounds[1:], strict=False)
        return _replay_batches(buffers, {source: chosen[a:b] - start for source, start, a, b in parts if a < b})

    def pick(self, size: int, count: int) -> NDArray[np.int64]:
        """Return the positions of the samples of one draw among ``size`` replayable ones.

        A policy whose draws change more than the generator overrides :meth:`draw_state` and :meth:`restore_draws`, too,
        because draws are undone.
        """
        return self.generator.choice(size, min(count, size), replace=False, shuffle=False)

    def draw_state(self) -> Any:
        """Return the state that drawing changes, from which draws are undone."""
        return self.generator.bit_generator.state

    def restore_draws(self, state: Any) -> None:
        """Restore from :meth:`draw_state`."""
        self.generator.bit_generator.state = state

    def convert(self, before: torch.dtype, after: torch.dtype) -> None:
        """Convert stored inputs, targets and logits of one type to another, with the model that is trained on them."""
        self._cancel_draws()
        self.dtype = after if self.dtype == before else self.dtype
        for buffer in self.buffers.values():
            buffer.map_fields(lambda field: field.to(after) if field.dtype == before else field)

    def leave(self, device: torch.device, other: torch.device) -> None:
        """Move the samples that are stored on a device to another one, unless the memory was given its device."""
        self._cancel_draws()
        for buffer in self.buffers.values() if self.device is None else ():
            buffer.map_fields(lambda field: field.to(other) if field.device == device else field)

    def replace(self, batch: "ReplayBatch", x: Inputs) -> None:
        """Replace the inputs of drawn samples; call it before the next :meth:`observe` or :meth:`finish`."""
        if sample_kind(x) != sample_kind(batch.x) or number_of_samples(x) != len(batch.y):
            raise TaskError(
                f"source {batch.source!r}: edited x ({describe(x)}) does not fit the memory's ({describe(batch.x)}); "
                "build the memory with the dtype in which inputs are edited"
            )
        self._cancel_draws()
        self.buffers[batch.source].replace(batch.slots.numpy(), input_fields(x))

    def __len__(self) -> int:
        """Return the number of replayable samples."""
        return sum([buffer.size for buffer in self.buffers.values() if self.replayable(buffer)])

    def counts(self) -> dict[str, list[int]]:
        """Return the number of replayable samples of every source and class."""
        return {
            source: np.bincount(buffer.labels, minlength=buffer.classes).tolist()
            for source, buffer in self.buffers.items()
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
            "tasks": [{"name": source, **buffer.state_dict()} for source, buffer in self.buffers.items()],
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
        if not isinstance(state["seen"], int):
            raise CheckpointError(f"memory has seen {state['seen']!r:.80} samples; use another checkpoint")
        self.seen = state["seen"]
        self.generator.bit_generator.state = state["generator"]
        self.buffers = {source["name"]: SourceBuffer.from_state_dict(source, self.device) for source in state["tasks"]}

    def _no_samples(self, x: Inputs) -> Inputs:
        """Return inputs like ``x`` without samples, with the dtype and device of stored inputs."""

        def empty(leaf: Tensor) -> Tensor:
            converted = isinstance(x, Tensor) or leaf.is_floating_point()
            dtype = self.dtype if converted and self.dtype is not None else leaf.dtype
            return torch.empty((0, *leaf.shape[1:]), dtype=dtype, device=self.device or leaf.device)

        return map_leaves(empty, x)

    def _running(self, source: str) -> "SourceBuffer":
        if source not in self.buffers:
            raise TaskError(
                f"memory has no source {source!r} (its sources: {', '.join(self.buffers) or 'none'}); start it first"
            )
        if not self.buffers[source].running:
            raise TaskError(f"source {source!r} is finished; memory accepts samples of running sources only")
        return self.buffers[source]

    def _evict(self, source: str, batch: Mapping[str, Tensor]) -> None:
        """Store the chosen samples of ``batch`` and evict all samples that the policy does not choose."""
        kept = self.choose()
        buffer, mask = self.buffers[source], kept.pop(source, None)
        buffer.retain(np.ones(len(buffer.ranks), dtype=bool) if mask is None else mask, batch)
        for name, mask in kept.items():
            if not mask.all():
                self.buffers[name].retain(mask, {})
        if len(self) > self.budget:
            raise SpclError(
                f"{type(self).__name__}.choose left {len(self)} replayable samples in a memory of {self.budget}; "
                f"its masks must leave at most {self.budget} over all sources"
            )


def _check_budget(budget: object) -> None:
    if not isinstance(budget, int) or budget < 1:
        raise SpclError(f"the budget of the memory is {budget!r}; give a budget of at least 1 sample")


def _replay_batches(
    buffers: Mapping[str, "SourceBuffer"], chosen: Mapping[str, NDArray[np.int64]]
) -> "list[ReplayBatch]":
    """Return copies of the samples at the chosen positions; their rows go to a GPU in one transfer."""
    if not chosen:
        return []
    rows = [buffers[source].rows[positions] for source, positions in chosen.items()]
    all_rows, sizes = torch.from_numpy(np.concatenate(rows)), [*map(len, rows)]
    on_devices, batches = {all_rows.device: all_rows.split_with_sizes(sizes)}, []
    for place, (source, positions) in enumerate(chosen.items()):
        buffer, fields = buffers[source], {}
        for name, field in buffer.fields.items():
            if field.device not in on_devices:
                on_devices[field.device] = all_rows.to(field.device, non_blocking=True).split_with_sizes(sizes)
            fields[name] = field.index_select(0, on_devices[field.device][place])
        inputs, edits = buffer.inputs_of(fields), torch.from_numpy(buffer.edits[positions])
        slots = torch.from_numpy(positions)
        batches.append(ReplayBatch(source, inputs, fields["y"], fields.get("logits"), slots, edits))
    return batches


MEMORIES: Registry[Callable[..., Memory]] = Registry(
    "memory", Memory, positional=1, keywords=("seed", "device", "dtype")
)
"""Memories by name: classes, or functions ``make(budget, *, seed, device, dtype, **options)``.

>>> MEMORIES.make("reservoir", 100, seed=1).budget
100
"""


def draw_ahead(memory: Memory, count: int) -> None:
    """Make the next draw now; :meth:`Memory.draw` returns it if the count matches and memory has not changed.

    >>> from spcl.memory import Reservoir
    >>> one, other = Reservoir(9, seed=0), Reservoir(9, seed=0)
    >>> for each in (one, other):
    ...     each.start("a", classes=None)
    ...     each.observe("a", torch.arange(9), torch.arange(9))
    >>> draw_ahead(one, 4)
    >>> torch.equal(one.draw(4)[0].x, other.draw(4)[0].x)
    True
    """
    memory._ahead.append(DrawAhead(count, memory.draw_state(), memory._draw(count)))


@dataclass(frozen=True)
class ReplayBatch:
    """Samples of one source drawn from a memory.

    Attributes:
        source: the source's name.
        x: inputs, in the form in which they were observed: a tensor, or a dict or tuple of tensors.
        y: targets.
        logits: the model's logits when the samples were stored, NaN for classes added later; None if memory has stored
            no logits for the source.
        slots: indices of the samples in the source's buffer, valid until samples are added or evicted.
        edits: how often the inputs of each sample were replaced.
    """

    source: str
    x: Inputs
    y: Tensor
    logits: Tensor | None
    slots: Tensor
    edits: Tensor


@dataclass(frozen=True)
class DrawAhead:
    """A draw made early, and the state from which it is undone."""

    count: int
    before: Any
    batches: list[ReplayBatch]


BATCH_SIZE = 256  # samples per call of the model in `store_logits`


class SourceBuffer:
    """The samples of one source, in the rows of tensors with room for more: ``x``, ``y`` and optionally ``logits``.

    Inputs that are a dict or tuple have a field for each tensor, e.g. ``x.tokens`` or ``x[0]``.

    Rows are unordered: read by :meth:`take`. New and edited samples never overwrite a row in use now or at
    :meth:`begin`, so :meth:`rollback` needs no copies.

    The metadata used to choose samples is on the host, so that choosing does not synchronize with an accelerator:
    ``labels``, ``ranks`` and ``edits`` (how often a sample's inputs were replaced) have one entry per stored sample,
    followed by entries for candidates that are not stored yet (:meth:`add_candidates`).
    :meth:`retain` stores the chosen candidates and evicts the samples that were not chosen.

    Attributes:
        task: the name of the task that the source answers.
        classes: number of classes of the task; a task without classes counts as one class.
        labelled: whether the task has classes, so that ``y`` holds labels.
        running: whether the source still gets new samples.
        rows: the row of every stored sample.
        size: the number of stored samples.
        nbytes: bytes of all stored samples.
        known_kind: the kind of the last batch that was found to fit the stored samples.
    """

    def __init__(self, classes: int | None, task: str) -> None:
        self.task = task
        self.classes = 1 if classes is None else classes
        self.labelled = classes is not None
        self.running = True
        self.rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.size = 0
        self.labels: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.ranks: NDArray[np.float64] = np.empty(0)
        self.edits: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.fields: dict[str, Tensor] = {}
        self.nbytes = 0
        self.known_kind: object = None
        self._before: dict[str, Any] | None = None

    # -- changes that can be undone

    def begin(self) -> None:
        """Remember the samples, whose arrays are replaced and never changed, for :meth:`rollback`."""
        self._before = {name: value for name, value in vars(self).items() if name != "_before"}

    def commit(self) -> None:
        """Forget the samples that were evicted since :meth:`begin`."""
        self._before = None

    def rollback(self) -> None:
        """Restore the samples of :meth:`begin`; the transaction stays open."""
        vars(self).update(self._before or {})

    # -- storing

    def allocate(self, x: Inputs, y: Tensor) -> None:
        """Create fields for inputs like ``x``, which has no samples, and, on the host, for targets like ``y``."""
        self.fields = self.fields or input_fields(x) | {"y": torch.empty((0, *y.shape[1:]), dtype=y.dtype)}

    def map_fields(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function that keeps rows to every field, between transactions."""
        self.fields = {name: function(field) for name, field in self.fields.items()}
        self.known_kind = None
        self._update_nbytes()

    def labels_of(self, y: Tensor) -> NDArray[np.int64]:
        """Return the classes of targets on the host; for probabilities, the most probable class."""
        if not self.labelled:
            return np.zeros(len(y), dtype=np.int64)
        labels = y.detach().cpu().argmax(dim=1) if y.is_floating_point() else y
        return labels.numpy(force=True).astype(np.int64)

    def add_candidates(self, ranks: NDArray[np.float64], y: Tensor) -> None:
        """Append the metadata of samples that :meth:`retain` may store."""
        self.ranks = np.concatenate([self.ranks, ranks])
        self.labels = np.concatenate([self.labels, self.labels_of(y)])
        self.edits = np.concatenate([self.edits, np.zeros(len(ranks), dtype=np.int64)])

    def retain(self, kept: NDArray[np.bool_], batch: Mapping[str, Tensor]) -> None:
        """Keep the samples in the mask ``kept`` and evict the others; kept candidates come from ``batch``."""
        source = _layout(kept, self.size)
        self.ranks, self.labels, self.edits = self.ranks[source], self.labels[source], self.edits[source]
        is_new = source >= self.size
        chosen = source[is_new] - self.size
        free, rows = self._free_rows(len(chosen)), np.empty_like(source)
        rows[is_new], rows[~is_new] = free, self.rows[source[~is_new]]
        self.rows, self.size = rows, len(rows)
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
            positions = np.arange(first, self.size, batches)  # every batch has samples of all classes
            logits = self._same_width(model(self.take_inputs(positions)))
            self._write("logits", self.rows[positions], logits)
        self._update_nbytes()

    def insert_logits(self, place: int, count: int) -> None:
        """Insert columns of NaN, for classes that were added, into the stored logits, if they reach there."""
        field = self.fields.get("logits")
        if field is not None and field.ndim > 1 and field.shape[1] > place:
            new = field.new_full((len(field), count, *field.shape[2:]), math.nan)
            self.fields = {**self.fields, "logits": torch.cat([field[:, :place], new, field[:, place:]], dim=1)}
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
            "task": self.task,
            "running": self.running,
            "ranks": torch.from_numpy(self.ranks),
            "edits": torch.from_numpy(self.edits),
            "fields": {name: self.take(name) for name in self.fields},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | None) -> "SourceBuffer":
        """Restore a buffer from :meth:`state_dict`, with inputs and logits on ``device`` (None: unchanged)."""
        buffer = cls(state["classes"], state.get("task", state.get("name")))
        buffer.running = state["running"]
        buffer.ranks = state["ranks"].cpu().numpy().copy()
        buffer.edits = state["edits"].cpu().numpy().copy()
        buffer.rows, buffer.size = np.arange(len(buffer.ranks)), len(buffer.ranks)
        devices = {"y": torch.device("cpu")}
        buffer.fields = {name: f.to(devices.get(name, device), copy=True) for name, f in state["fields"].items()}
        if buffer.fields:
            buffer.labels = buffer.labels_of(buffer.fields["y"])
        buffer._check_restored()
        buffer._update_nbytes()
        return buffer

    def _check_restored(self) -> None:
        """Raise an error unless all samples have all fields, and labels are classes of the source."""
        if not isinstance(self.running, bool):
            raise CheckpointError(f"a source of memory is running = {self.running!r:.80}; use another checkpoint")
        if self.size and not ({"y"} < self.fields.keys() and set(leaves(self.inputs_of(self.fields)))):
            raise CheckpointError(f"memory has the fields {sorted(self.fields)} of samples; use another checkpoint")
        sizes = [self.ranks.shape, self.edits.shape, *((len(field),) for field in self.fields.values())]
        if any(size != (self.size,) for size in sizes):
            raise CheckpointError("memory has fields of different numbers of samples; use another checkpoint")
        if self.labelled and ((self.labels < 0) | (self.labels >= self.classes)).any():
            raise CheckpointError(f"memory has labels outside 0…{self.classes - 1}; use another checkpoint")

    # -- rows

    def _free_rows(self, count: int) -> NDArray[np.int64]:
        """Return rows that hold no sample, now or at :meth:`begin`."""
        capacity = len(self.fields["y"]) if self.fields else 0
        is_free = np.ones(capacity, dtype=bool)
        is_free[self.rows] = False
        if self._before is not None and self._before["fields"].get("y") is self.fields.get("y"):
            is_free[self._before["rows"]] = False
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
        """Reallocate the fields if most of their rows hold no sample."""
        if any(len(field) > 2 * self.size for field in self.fields.values()):
            self.fields = {name: self.take(name) for name in self.fields}
            self.rows = np.arange(self.size)

    def _update_nbytes(self) -> None:
        self.nbytes = sum([field.nbytes // len(field) * self.size for field in self.fields.values() if len(field)])

    def _put(self, rows: NDArray[np.int64], batch: Mapping[str, Tensor], chosen: NDArray[np.int64]) -> None:
        """Copy the chosen samples of the batch to rows; a GPU gets source and target indices in one transfer."""
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
