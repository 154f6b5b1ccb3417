"""A stream over sources that run concurrently, each at its own speed.

First the stream itself, then the queues and the threads that fill them, then sources that are read several times.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from spcl._util.registry import Named
from spcl._util.validation import check_content
from spcl.batches import Batch, as_batch, as_inputs, as_tensor
from spcl.errors import DataError, SpclError, TaskError
from spcl.sources import (
    Found,
    Hub,
    HubError,
    HubReader,
    HubSource,
    IterableSource,
    Message,
    Rejected,
    Source,
    as_source,
)
from spcl.sources.base import check_sizes
from spcl.sources.reader import WAIT_SECONDS
from spcl.streams.parallel import Moment
from spcl.tasks import TaskDescription

SHORTEST_PAUSE = 0.002
HANGING_SECONDS = 30.0  # after which a hub that does not answer is reported
_END = object()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """The last exception of a source, its time (`time.time()`), and the number of exceptions so far."""

    exception: BaseException
    time: float
    count: int


def log_failure(name: str, failure: Failure) -> None:
    """Log the failure of a source as a warning."""
    _log.warning("source %r failed (%d×): %r", name, failure.count, failure.exception)


def log_rejected(name: str, rejected: Rejected) -> None:
    """Log a message that a source rejects as a warning."""
    _log.warning("source %r: %s rejected: %s", name, rejected.position, rejected.reason)


class LiveStream:
    """Moments of named sources that run concurrently: generators, DataLoaders, any iterable of `(x, y)` batches, or a
    :class:`spcl.sources.Source`, whose batches have positions.

    Each source is read into its own queue, by its own thread or, of a hub, by one thread for all its tasks. A moment
    holds at most one batch of each source that has one queued; iteration blocks only while all queues are empty. So a
    slow source does not delay the others, and a source that is faster than the learner is paused when `capacity`
    batches are queued.

    - A task is `started` in the moment of its first batch, and `ended` once its source is known to be exhausted or
      removed: often after its last batch, in a moment that may have no batches.
    - A source that raises, or yields anything but inputs (an array, or a dict or tuple of arrays) and as many targets,
      all tensors or NumPy arrays, has failed. It is listed in `failures` and reported to `on_failure`, but has not
      ended: `restart` resumes it, `remove` ends it.
    - Iteration ends when no source is running and all batches are delivered, after `patience` seconds without events,
      or on `close`. Iterating again continues with batches queued since.
    - `last_seen` has the time (`time.time()`) at which each source last yielded a batch, `lag` the seconds for which
      the next one has been awaited: a source that stalls neither fails nor ends, but its lag grows.
    - `add`, `restart`, `remove` and `close` may be called from any thread at any time.
    - The positions of what was delivered are in `state_dict()`: a `Source` is read on from there after
      `load_state_dict`, so that every batch is delivered exactly once to a learner that is saved together with the
      stream. Call `commit` after a checkpoint, so that sources may forget.
    - `tasks`, `classes` and `encoders` say what sources answer and through which modules, as `Learner.fit` reads them:
      what was given, and what the sources of a hub announce.

    Args:
        sources: The first sources by name, iterables or of the type `Source`; their threads start immediately.
        capacity: The largest number of queued batches per source.
        patience: Seconds to wait for a batch or another event before iteration ends; None waits without limit.
        keep_open: Wait for sources to be added or restarted when none is running, instead of ending the iteration.
        on_failure: Called as `on_failure(name, failure)` in the iterating thread, before the next moment; it may call
            `restart` or raise. By default the failure is logged as a warning.
        together: Wait in every moment for a batch of every source that is being read, so that the composition of the
            moments does not depend on the pace of the sources; a source that stalls then delays all.
        on_rejected: Called as `on_rejected(name, rejected)` in the iterating thread for messages that a `Source`
            rejects, in its order. By default they are logged as warnings.
        epochs: How often every source is read from its beginning: lists, DataLoaders and other iterables that can be
            iterated again. Their batches then have positions: a stream whose state was loaded reads on by itself.
        tasks: The task that a source answers, by source; one that is not listed has a task of its own name.
        classes: The number or names of the classes of a task, by task.
        encoders: A module in front of the network, or the name of an encoder, by source.

    >>> import torch
    >>> def sensor(readings):
    ...     for reading in readings:
    ...         yield torch.tensor([reading]), torch.tensor([0])
    >>> with LiveStream({"camera": sensor([1.0, 2.0]), "lidar": sensor([5.0])}) as stream:
    ...     seen = [float(x) for moment in stream for x, y in moment.batches.values()]
    >>> sorted(seen), sorted(stream.delivered.items())
    ([1.0, 2.0, 5.0], [('camera', 2), ('lidar', 1)])
    """

    def __init__(
        self,
        sources: Mapping[str, Iterable[Any] | Source] | None = None,
        *,
        capacity: int = 4,
        patience: float | None = None,
        keep_open: bool = False,
        on_failure: Callable[[str, Failure], None] = log_failure,
        together: bool = False,
        on_rejected: Callable[[str, Rejected], None] = log_rejected,
        epochs: int = 1,
        tasks: Mapping[str, str] | None = None,
        classes: Mapping[str, int | Sequence[str]] | None = None,
        encoders: Mapping[str, nn.Module | Named] | None = None,
    ) -> None:
        _check_arguments(sources, capacity, patience, on_failure, epochs)
        for argument, given in (("tasks", tasks), ("classes", classes), ("encoders", encoders)):
            if not isinstance(given, Mapping | None):
                raise SpclError(f"{argument} is a {type(given).__name__}; give a dict by name")
        self.capacity = capacity
        self.patience = patience
        self.keep_open = keep_open
        self.on_failure = on_failure
        self.together = together
        self.on_rejected = on_rejected
        self.epochs = epochs
        self.failures: dict[str, Failure] = {}
        self.delivered: dict[str, int] = {}
        self._tasks = dict(tasks or {})
        self._classes = dict(classes or {})
        self._encoders = dict(encoders or {})
        self._sources: dict[str, _Queue] = {}
        self._progress = _Progress()
        self._ended: dict[str, bool] = {}  # all names that ended, in order, and whether a moment has listed them
        self._unreported: deque[tuple[str, Failure]] = deque()
        self._threads: list[threading.Thread] = []
        self._step = 0
        self._closed = False
        self._readers = _Readers(capacity, self._stop_reading)
        self._changed = self._readers.changed  # its lock guards all of the above
        self.last_seen = self._readers.last_seen
        checked = {name: self._as_source(name, source) for name, source in (sources or {}).items()}
        with self._changed:
            for name, each in checked.items():  # no thread starts before all sources are checked
                self._sources[name] = self._new_queue(name, each)

    @property
    def running(self) -> tuple[str, ...]:
        """Sources that are being read or still have batches queued."""
        with self._changed:
            return tuple(queue.name for queue in self._sources.values() if queue.reading or queue.messages)

    @property
    def failed(self) -> tuple[str, ...]:
        """Sources that have failed and were not restarted."""
        with self._changed:
            return tuple(queue.name for queue in self._sources.values() if queue.failed)

    @property
    def lag(self) -> dict[str, float]:
        """Seconds for which each source that is being read has been awaited; 0 while its queue is full."""
        with self._changed:
            now = time.monotonic()
            return {
                queue.name: 0.0 if queue.awaited_since is None else now - queue.awaited_since
                for queue in self._sources.values()
                if queue.reading
            }

    @property
    def queued(self) -> dict[str, int]:
        """The number of batches that are queued, by source."""
        with self._changed:
            return {queue.name: len(queue.messages) for queue in self._sources.values()}

    @property
    def positions(self) -> dict[str, str]:
        """The position of the last message of every `Source` that was delivered or rejected."""
        with self._changed:
            return dict(self._progress.positions)

    @property
    def ends(self) -> dict[str, str]:
        """How far each `Source` that has ended was read; of one that was removed, how far it was delivered."""
        with self._changed:
            return dict(self._progress.ends)

    @property
    def ended(self) -> tuple[str, ...]:
        """Sources that have ended, including sources that never had a batch."""
        with self._changed:
            return tuple(name for name, announced in self._ended.items() if announced)

    @property
    def tasks(self) -> dict[str, str]:
        """The tasks that sources answer, by source, as far as they are known to differ from the source's name."""
        announced = {name: task.name for name, (task, _) in self._announced().items() if task.name != name}
        return self._tasks | announced

    @property
    def classes(self) -> dict[str, int | Sequence[str]]:
        """The numbers or names of classes that are known, by task."""
        described = [task for task, _ in self._announced().values() if task.kind == "classification"]
        return self._classes | {task.name: task.class_names or task.classes or 0 for task in described}

    @property
    def encoders(self) -> dict[str, nn.Module | Named]:
        """The encoders of sources that have one, by source."""
        announced = {name: encoder for name, (_, encoder) in self._announced().items() if encoder is not None}
        return announced | self._encoders

    def add(
        self,
        name: str,
        source: Iterable[Any] | Source,
        *,
        task: str | None = None,
        encoder: nn.Module | Named | None = None,
    ) -> None:
        """Add a source and start to read it; of its task and encoder, `tasks` and `encoders` tell."""
        with self._changed:
            if name in self._sources or name in self._ended:
                raise TaskError(
                    f"there is or was a source {name!r}; add this one under another name, or start one that has ended "
                    f"again with restart({name!r}, source)"
                )
            self._check_open(name)
            queue = self._new_queue(name, self._as_source(name, source))
            self._sources[name] = queue
            if task is not None:
                self._tasks[name] = task
            if encoder is not None:
                self._encoders[name] = encoder

    def restart(self, name: str, source: Iterable[Any] | Source, *, after: str | None = None) -> None:
        """Resume a failed source with a new iterable or source, or start one again that has ended.

        Of a failed source, batches queued before are delivered first. One that had ended is `started` again, and counts
        in `delivered` from 0; a `Source` is read on after its end, or after the given position, an iterable from its
        beginning.
        """
        with self._changed:
            if name in self._ended:
                self._check_open(name)
                given = self._as_source(name, source)
                if self._ended.pop(name):  # else the end was not told, and nobody need know of it
                    self.delivered.pop(name, None)
                self._progress.resume(name, after, reads_on=not isinstance(given, _EpochSource | IterableSource))
                self._sources[name] = self._new_queue(name, given)
                return
            queue = self._find(name)
            if not queue.failed:
                raise TaskError(f"source {name!r} has not failed, and not ended; others cannot be restarted")
            self._check_open(name)
            queue.source = self._as_source(name, source)
            self._keep(self._readers.start(queue, queue.after))

    def remove(self, name: str) -> None:
        """End a source immediately and discard its queued batches."""
        with self._changed:
            queue = self._find(name)
            queue.stop()
            self._end(queue)
            self._changed.notify_all()

    def close(self, timeout: float = 1.0) -> None:
        """Stop all sources and join their threads for at most `timeout` seconds.

        A thread that is blocked in its source cannot be interrupted: it exits when the source next yields, at the
        latest with the program.
        """
        with self._changed:
            self._closed = True
            for queue in self._sources.values():
                queue.stop()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Moment]:
        while (moment := self._next()) is not None:
            yield moment

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the number of batches delivered per source, the sources that have ended, and positions.

        An iterable cannot be rewound and has no position: on resuming, the caller skips the batches that were
        delivered; batches that were read but not delivered are lost.
        """
        with self._changed:
            state = {"step": self._step, "delivered": dict(self.delivered), "ended": list(self.ended)}
            return state | self._progress.state_dict(self.ended)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`; call it before the first moment is taken.

        Tasks that had started are not listed in `started` again, and sources of tasks that had ended are removed.
        """
        check_content("the stream", state, {"step": int, "delivered": dict[str, int], "ended": list[str]})
        for name in state.keys() & {"positions", "ends"}:
            check_content("the stream", state, {name: dict[str, str]})
        with self._changed:
            self._step, self.delivered = state["step"], dict(state["delivered"])
            self._progress.load_state_dict(state)
            for name in self._ended:  # a source may have been exhausted before this call
                self._ended[name] = name not in self.delivered
            for name in state["ended"]:
                if name in self._sources:
                    queue = self._sources.pop(name)
                    queue.stop()
                    self._progress.restore_end(queue)
                self._ended[name] = True
            for name, queue in self._sources.items():
                queue.started = name in self.delivered
                if name in self._progress.positions and queue.can_be_read_again:
                    queue.stop()
                    self._sources[name] = self._new_queue(name, queue.source)
            self._changed.notify_all()

    def commit(self) -> None:
        """Let sources forget what they need no more; call it after a checkpoint with `state_dict()` is saved.

        Sources may forget what was delivered before the previous checkpoint: both of the last two can be resumed.
        """
        with self._changed:
            forgettable = self._progress.forgettable(self._sources, self.ended)
        for source, position in forgettable:
            source.commit(position)

    def _announced(self) -> dict[str, tuple[TaskDescription, Named | None]]:
        """Return what the sources of hubs say of themselves: their tasks and encoders."""
        with self._changed:
            sources = [(queue.name, queue.source) for queue in self._sources.values()]
        return {
            name: (source.description, source.encoder)
            for name, source in sources
            if isinstance(source, HubSource) and source.description is not None
        }

    def _as_source(self, name: str, given: Iterable[Any] | Source) -> Source:
        return as_source(given) if self.epochs == 1 else _EpochSource(name, given, self.epochs)

    def _find(self, name: str) -> "_Queue":
        if name not in self._sources:
            raise TaskError(f"there is no source {name!r} that has not ended; the sources are {list(self._sources)}")
        return self._sources[name]

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise SpclError(f"the stream is closed, so source {name!r} cannot be added; create a new LiveStream")

    def _new_queue(self, name: str, source: Source) -> "_Queue":
        queue = _Queue(name, source, name in self.delivered, self._readers)
        self._keep(self._readers.start(queue, self._progress.positions.get(name)))
        return queue

    def _keep(self, thread: threading.Thread) -> None:
        self._threads = [*{each for each in self._threads if each.is_alive()} | {thread}]

    def _stop_reading(self, queue: "_Queue", error: BaseException | None) -> None:
        with self._changed:
            queue.reading, queue.awaited_since = False, None
            if error is not None and not queue.stopped:
                queue.failed = True
                count = self.failures[queue.name].count + 1 if queue.name in self.failures else 1
                failure = self.failures[queue.name] = Failure(error, time.time(), count)
                self._unreported.append((queue.name, failure))
            if queue.exhausted and not queue.stopped:
                self._end(queue)
            self._changed.notify_all()

    def _next(self) -> Moment | None:
        deadline = self._deadline()
        while True:
            self._readers.open_received()
            with self._changed:
                seconds = min(max(0.0, deadline - time.monotonic()), HANGING_SECONDS)  # to report a hub that hangs
                is_event = self._changed.wait_for(lambda: self._readers.has_received or self._has_event(), seconds)
                has_more = self._readers.has_received or not (is_event or time.monotonic() >= deadline)
                if has_more and not self._closed:
                    continue
                report = None if self._closed else self._next_report()
                if report is None:
                    return self._collect()
            report()  # without the lock, and one at a time, as the call may raise
            deadline = self._deadline()

    def _deadline(self) -> float:
        return math.inf if self.patience is None else time.monotonic() + self.patience

    def _next_report(self) -> Callable[[], object] | None:
        """Return the call that reports the next failure or rejected message, if there is one."""
        if self._unreported:
            return partial(self.on_failure, *self._unreported.popleft())
        for name, queue in self._sources.items():
            if queue.rejects:
                rejected = cast(Rejected, queue.take())
                self._progress.positions[name] = rejected.position
                if queue.exhausted:
                    self._end(queue)
                self._changed.notify_all()
                return partial(self.on_rejected, name, rejected)
        return None

    def _has_event(self) -> bool:
        queues = self._sources.values()
        return (
            self._closed
            or bool(self._unreported)
            or not all(self._ended.values())
            or any(queue.rejects for queue in queues)
            or self._has_batches()
            or not (self.keep_open or any(queue.reading for queue in queues))
        )

    def _has_batches(self) -> bool:
        """Whether a moment can have batches now."""
        queues = self._sources.values()
        waiting = self.together and any(queue.reading and not queue.has_batch for queue in queues)
        return not waiting and any(queue.has_batch for queue in queues)

    def _collect(self) -> Moment | None:
        if self._closed:
            return None
        batches = {}
        # Together, a task that has ended is finished before the next step, whenever its end became known.
        if self._has_batches() and not (self.together and not all(self._ended.values())):
            batches = {name: self._take(queue) for name, queue in self._sources.items() if queue.has_batch}
        started = tuple(name for name in batches if not self._sources[name].started)
        for name in batches:
            self._sources[name].started = True
            self.delivered[name] = self.delivered.get(name, 0) + 1
        for queue in [queue for queue in self._sources.values() if queue.exhausted]:
            self._end(queue)
        ended = tuple(name for name, announced in self._ended.items() if not announced)
        self._ended.update(dict.fromkeys(ended, True))
        if not (batches or ended):
            return None
        self._changed.notify_all()
        self._step += 1
        return Moment(self._step - 1, batches, started, ended)

    def _take(self, queue: "_Queue") -> Batch:
        message = cast(Message, queue.take())
        if queue.can_be_read_again:
            self._progress.positions[queue.name] = message.position
        return message.batch

    def _end(self, queue: "_Queue") -> None:
        """Remove the source; the next moment lists it in `ended` if one has listed it in `started`."""
        del self._sources[queue.name]
        self._progress.end(queue)
        self._ended[queue.name] = not queue.started


def _check_arguments(sources: object, capacity: object, patience: object, on_failure: object, epochs: object) -> None:
    """Refuse arguments that a live stream cannot use."""
    if not isinstance(sources, Mapping | None):
        raise SpclError(f"sources is a {type(sources).__name__}; give a dict of iterables by name")
    if not isinstance(capacity, int) or capacity < 1:
        raise SpclError(f"capacity is {capacity!r}; give an integer number of batches, at least 1")
    if patience is not None and not (isinstance(patience, int | float) and 0 <= patience <= threading.TIMEOUT_MAX):
        raise SpclError(f"patience is {patience!r}; give a number of seconds, or None to wait without limit")
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise SpclError(f"epochs is {epochs!r}; give a positive whole number")
    if not callable(on_failure):
        raise SpclError(f"on_failure is {on_failure!r}; give a function of the source's name and its Failure")


class _Progress:
    """How far sources that can be read again were delivered, and what they may forget; the stream's lock guards it.

    Attributes:
        positions: the position of the last message of every source that was delivered or rejected.
        ends: how far each source that has ended was read, the announcement of its end included.
    """

    def __init__(self) -> None:
        self.positions: dict[str, str] = {}
        self.ends: dict[str, str] = {}
        self._saved: dict[str, str] = {}  # the positions in the last checkpoint
        self._ended: dict[str, Source] = {}  # sources that were not told yet that all can be forgotten

    def end(self, queue: "_Queue") -> None:
        """Note how far a source was read that has ended; of one that was stopped, how far it was delivered."""
        position = self.positions.get(queue.name) if queue.stopped else queue.after
        if queue.can_be_read_again and position is not None:
            self.ends[queue.name] = position
            self._ended[queue.name] = queue.source

    def forgettable(self, queues: "Mapping[str, _Queue]", ended: Collection[str]) -> list[tuple[Source, str]]:
        """Return the sources, and up to where each may forget its messages, after a checkpoint.

        Args:
            queues: of the sources that have not ended.
            ended: sources that have ended according to the checkpoint.
        """
        saved, self._saved = self._saved, self._in_checkpoint(ended)
        sources = self._ended | {name: queue.source for name, queue in queues.items()}
        self._ended = {name: source for name, source in self._ended.items() if saved.get(name) != self.ends[name]}
        return [(sources[name], position) for name, position in saved.items() if name in sources]

    def state_dict(self, ended: Collection[str]) -> dict[str, Any]:
        """Return the positions, and the ends of these sources, as far as there are any."""
        ends = {name: position for name, position in self.ends.items() if name in ended}
        return {name: each for name, each in {"positions": dict(self.positions), "ends": ends}.items() if each}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from the state of a stream."""
        self.positions = dict(state.get("positions", {}))
        self.ends |= state.get("ends", {})
        self._saved = self._in_checkpoint(state["ended"])

    def resume(self, name: str, after: str | None, reads_on: bool) -> None:
        """Let a source that had ended start again: after a position or its end, or from its beginning."""
        end = self.ends.pop(name, None) if after is None else after
        self.ends.pop(name, None)
        self._ended.pop(name, None)
        self.positions.pop(name, None)
        if reads_on and end is not None:
            self.positions[name] = end

    def restore_end(self, queue: "_Queue") -> None:
        """Let a source forget that had ended according to the state that was loaded."""
        if queue.name in self.ends:
            self._ended[queue.name] = queue.source

    def _in_checkpoint(self, ended: Collection[str]) -> dict[str, str]:
        return self.positions | {name: position for name, position in self.ends.items() if name in ended}


# -- queues, and the threads that fill them


class _Queue:
    """The messages of a source that were read and not delivered yet; `_Readers.lock` guards all attributes.

    Attributes:
        name: the source's name.
        source: what is read.
        messages: read and not delivered.
        after: the position up to which messages are queued or delivered.
        started: whether a moment has listed the source in `started`.
        awaited_since: when the thread began to wait for the next message; None while it does not wait.
        reading: whether a thread may still append; False once the source is exhausted or failed.
        failed: whether the source raised.
        stopped: whether the thread must stop reading it.
        has_space: the thread that reads the source waits for this condition.
        low: the thread reads on when at most `low` messages are queued.
    """

    def __init__(self, name: str, source: Source, started: bool, readers: "_Readers") -> None:
        self.name = name
        self.source = source
        self.messages: deque[Message | Rejected] = deque()
        self.after: str | None = None
        self.started = started
        self.awaited_since: float | None = None
        self.reading = True
        self.failed = False
        self.stopped = False
        self.has_space = threading.Condition(readers.lock)  # its own: of 64 threads, only this one is to wake up
        self.capacity = readers.capacity
        self.low = readers.capacity - 1
        self._changed = readers.changed
        self._last_seen = readers.last_seen

    @property
    def exhausted(self) -> bool:
        """Whether all batches are delivered and no more will come."""
        return not (self.reading or self.failed or self.messages)

    @property
    def can_be_read_again(self) -> bool:
        """Whether the source has positions that mean something after a crash."""
        return not isinstance(self.source, IterableSource)

    @property
    def rejects(self) -> bool:
        """Whether the next message is rejected."""
        return bool(self.messages) and isinstance(self.messages[0], Rejected)

    @property
    def has_batch(self) -> bool:
        """Whether the next message is a batch."""
        return bool(self.messages) and isinstance(self.messages[0], Message)

    @property
    def is_low(self) -> bool:
        """Whether it is time to read on."""
        return len(self.messages) <= self.low

    def take(self) -> Message | Rejected:
        """Return the next message, and let the thread read on when it is time to."""
        message = self.messages.popleft()
        if self.is_low:
            self.has_space.notify()
        return message

    def stop(self) -> None:
        """Let the thread stop reading, and forget what is queued."""
        self.stopped = True
        self.messages.clear()
        self.has_space.notify()
        self.source.close()

    def put(self, messages: Sequence[Message | Rejected], after: str | None) -> None:
        """Queue messages; the source is read on from the position `after`."""
        with self._changed:
            if self.stopped:
                return
            self.after = after
            if messages:
                was_empty = not self.messages
                self.messages.extend(messages)
                self.awaited_since = None
                self._last_seen[self.name] = time.time()
                if was_empty:  # otherwise nothing changes for the iterating thread
                    self._changed.notify_all()

    def fill(self) -> None:
        """Read the source to its end, in a thread of its own."""
        messages = self.source.read(self.after)
        while self._wait_for_space() and (message := next(messages, _END)) is not _END:
            checked = _checked(message)
            self.put([checked], checked.position)

    def _wait_for_space(self) -> bool:
        with self.has_space:
            self.has_space.wait_for(lambda: self.stopped or self.is_low)
            self.awaited_since = time.monotonic()
            return not self.stopped


def _checked(message: object) -> Message | Rejected:
    """Return a message with a batch of tensors, or raise an error if it has none."""
    if isinstance(message, Rejected):
        return message
    if not isinstance(message, Message):
        raise DataError(f"the source yielded a {type(message).__name__}; yield a Message with position and batch")
    if isinstance(message.batch, tuple | list) and len(message.batch) == 2 and isinstance(message.batch[1], Mapping):
        x, parts = as_inputs(message.batch[0]), {task: as_tensor(y) for task, y in message.batch[1].items()}
        for y in parts.values():
            check_sizes(x, y)
        return Message(message.position, (x, parts))  # of a source that answers several tasks
    x, y = as_batch(message.batch)
    check_sizes(x, y)
    return Message(message.position, (x, y))


class _Readers:
    """Starts the threads that fill queues, and what they share.

    Args:
        capacity: the largest number of queued messages per source.
        on_end: called from the reading thread with the queue of a source that has ended, and its exception or None.

    Attributes:
        lock: guards queues.
        changed: a condition of the same lock; notified of everything that the iterating thread may wait for.
        last_seen: when each source last yielded (`time.time()`).
    """

    def __init__(self, capacity: int, on_end: Callable[[_Queue, BaseException | None], object]) -> None:
        self.capacity = capacity
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.last_seen: dict[str, float] = {}
        self.on_end = on_end
        self._hubs: dict[int, _HubThread] = {}

    def start(self, queue: _Queue, after: str | None) -> threading.Thread:
        """Read a source after a position, from now on; return the thread, which other sources may share."""
        queue.failed, queue.reading, queue.after = False, True, after
        queue.awaited_since = time.monotonic()
        source = queue.source
        if not isinstance(source, HubSource):
            thread = threading.Thread(target=self._fill, args=(queue,), name=f"source {queue.name}", daemon=True)
            thread.start()
            return thread
        shared = self._hubs.get(id(source.hub))
        if shared is None or not shared.queues:
            shared = self._hubs[id(source.hub)] = _HubThread(source.hub, self)
        shared.add(queue, source)
        return shared.thread

    @property
    def has_received(self) -> bool:
        """Whether there are messages to open."""
        return any(hub.received for hub in self._hubs.values())

    def open_received(self) -> None:
        """Decode and queue what was received from hubs, and report hubs that hang.

        Called by the iterating thread, without the lock: nobody waits for it.
        """
        with self.lock:
            hubs = list(self._hubs.values())
        for hub in hubs:
            hub.open_received()
            hub.report_if_hanging()

    def _fill(self, queue: _Queue) -> None:
        try:
            queue.fill()
        except BaseException as error:  # also SystemExit: otherwise a dead source would look like a slow one
            self.on_end(queue, error)
        else:
            self.on_end(queue, None)


class _HubThread:
    """One thread for all sources of a hub: it receives the messages of all tasks by one call.

    Threads that read at the same time would only take the GIL from each other and from the thread that trains. This one
    does not decode: the iterating thread takes less time for it than decoding here would keep it waiting. The thread
    ends when it has no more queues to fill.

    Attributes:
        queues: by queue, the source.
        received: messages that were not opened yet.
    """

    def __init__(self, hub: Hub, readers: _Readers) -> None:
        self.queues: dict[_Queue, HubSource] = {}
        self.received: dict[_Queue, Found] = {}
        self.thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._hub = HubReader(hub)
        self._opening: set[_Queue] = set()  # not to be read on before their messages are queued
        self._has_space = threading.Condition(readers.lock)
        self._changed = readers.changed
        self._on_end = readers.on_end
        self._asked_at: float | None = None  # when the present call of the hub began; None between calls

    def add(self, queue: _Queue, source: HubSource) -> None:
        """Read one more source; the caller holds the lock."""
        queue.has_space = self._has_space
        queue.low = queue.capacity // 2  # seldom and several, since waking a thread takes longer than a message
        self.queues[queue] = source
        if len(self.queues) == 1 and not self.thread.is_alive():
            self.thread.start()
        self._has_space.notify()

    def open_received(self) -> None:
        """Decode what was received, and queue it."""
        with self._changed:
            received, self.received = self.received, {}
            sources = {queue: self.queues[queue] for queue in received if queue in self.queues and not queue.stopped}
            self._opening |= sources.keys()
        for queue, source in sources.items():
            excerpt = source.open(queue.after, received[queue])
            queue.put(excerpt.messages, excerpt.after)
            if excerpt.ended:
                self._end(queue, None)
        if received:
            with self._has_space:
                self._opening -= sources.keys()
                self._has_space.notify()

    def report_if_hanging(self) -> None:
        """Report a hub that has not answered for long; the thread itself cannot."""
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() > asked_at + HANGING_SECONDS:
            with self._changed:
                sources = list(self.queues.values())
            for source in sources:
                source.report(HubError(f"the hub has not answered for {HANGING_SECONDS:g} s"))

    def _run(self) -> None:
        pause = SHORTEST_PAUSE
        try:
            while self._has_queues():
                with self._has_space:
                    wanted = self._wanted()
                    waits = not self.received and not self._opening and all(queue.is_low for queue in self.queues)
                if wanted and self._read(wanted, WAIT_SECONDS if waits else 0.0):
                    pause = SHORTEST_PAUSE
                else:
                    self._rest(wanted, pause)
                    pause = min(2 * pause, WAIT_SECONDS)
        except BaseException as error:
            for queue in list(self.queues):
                self._end(queue, error)

    def _has_queues(self) -> bool:
        with self._has_space:
            for queue in [queue for queue in self.queues if queue.stopped]:
                del self.queues[queue]
            return bool(self.queues)

    def _wanted(self) -> list[_Queue]:
        """Return the queues to read for."""
        wanted = [
            queue
            for queue, source in self.queues.items()
            if queue.is_low and queue not in self.received and queue not in self._opening and not source.is_paused
        ]
        for queue in wanted:
            queue.awaited_since = queue.awaited_since or time.monotonic()
        return wanted

    def _rest(self, known: list[_Queue], seconds: float) -> None:
        """Wait until the queues to read for are not the `known` ones, or one is stopped."""
        with self._has_space:
            self._has_space.wait_for(
                lambda: any(each.stopped for each in self.queues) or self._wanted() != known, seconds
            )

    def _read(self, wanted: list[_Queue], wait: float) -> bool:
        """Receive messages; return whether there were any."""
        sources = {self.queues[queue]: queue for queue in wanted}
        count = (wanted[0].capacity + 1) // 2
        self._asked_at = time.monotonic()
        found = self._hub.read({source: queue.after for source, queue in sources.items()}, count, wait)
        self._asked_at = None
        received = {sources[source]: messages for source, messages in found.items() if messages}
        with self._changed:
            for queue in received:
                queue.awaited_since = None
            self.received |= received
            self._changed.notify_all()
        return bool(received)

    def _end(self, queue: _Queue, error: BaseException | None) -> None:
        with self._has_space:
            self.queues.pop(queue, None)
            self.received.pop(queue, None)
        self._on_end(queue, error)


# -- sources that are read several times


class _EpochSource:
    """Reads an iterable of batches several times; positions say the epoch and the number of the batch in it.

    After a position, the batches before it are read again and skipped. A DataLoader that shuffles gives every epoch an
    order of its own, which depends on the first seed of its generator alone, so that this order is found again.

    Args:
        name: the source's name, for errors.
        iterable: gives the same batches whenever it is iterated, e.g. a list or a DataLoader.
        epochs: how often it is read.

    >>> source = _EpochSource("camera", ["x", "y"], epochs=2)
    >>> [(message.position, message.batch) for message in source.read(after="0/1")]
    [('0/2', 'y'), ('1/1', 'x'), ('1/2', 'y')]
    """

    def __init__(self, name: str, iterable: Iterable[Any] | Source, epochs: int) -> None:
        if isinstance(iterable, Source):
            raise SpclError(
                f"source {name!r} is a {type(iterable).__name__}, whose messages are read once, but epochs is "
                f"{epochs}; add it to a stream of its own, with epochs=1"
            )
        as_source(iterable)  # raises an error unless it can be iterated
        if isinstance(iterable, Iterator):
            raise SpclError(
                f"source {name!r} is a {type(iterable).__name__}, which cannot be read again, but epochs is {epochs}; "
                f"give a list, a DataLoader, or an object whose __iter__ starts anew"
            )
        self._iterable = iterable
        self._epochs = epochs
        self._beginning = threading.Lock()  # a reader that was stopped may still be beginning
        self._generator: torch.Generator | None = None
        if isinstance(iterable, DataLoader) and isinstance(iterable.sampler, RandomSampler):
            if iterable.generator is None:
                raise SpclError(
                    f"source {name!r} is a DataLoader that shuffles without a generator, so that its epochs cannot be "
                    f"resumed; give it generator=torch.Generator().manual_seed(0)"
                )
            self._generator = iterable.generator
        self._seed = 0 if self._generator is None else self._generator.initial_seed()

    def read(self, after: str | None) -> Iterator[Message]:
        """Yield the batches after a position."""
        first, done = map(int, after.split("/")) if after else (0, 0)
        for epoch in range(first, self._epochs):
            for number, batch in enumerate(self._batches(epoch), 1):
                if number > done:
                    yield Message(f"{epoch}/{number}", batch)
            done = 0

    def _batches(self, epoch: int) -> Iterator[Any]:
        with self._beginning:
            if self._generator is not None:
                self._generator.manual_seed((self._seed + epoch) % 2**63)
            batches = iter(self._iterable)
            begun = list(islice(batches, 1))  # draws the order
        yield from begun
        yield from batches

    def commit(self, upto: str) -> None:
        """Do nothing: an iterable forgets nothing."""

    def close(self) -> None:
        """Do nothing: an iterator cannot be interrupted."""
