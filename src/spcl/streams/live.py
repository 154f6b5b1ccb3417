"""A stream over sources that run concurrently, each at its own speed."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from spcl.batches import Batch
from spcl.errors import SpclError, TaskError
from spcl.sources import Message, Rejected, Source, as_source
from spcl.streams.arguments import check_arguments
from spcl.streams.feeder import Feeder
from spcl.streams.moment import Moment
from spcl.streams.progress import Progress
from spcl.streams.reader import Failure, Queues, Reader
from spcl.streams.reports import log_failure, log_rejected

__all__ = ["Failure", "LiveStream"]


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
    ) -> None:
        check_arguments(sources, capacity, patience, on_failure)
        self.capacity = capacity
        self.patience = patience
        self.keep_open = keep_open
        self.on_failure = on_failure
        self.together = together
        self.on_rejected = on_rejected
        self.failures: dict[str, Failure] = {}
        self.delivered: dict[str, int] = {}
        self.last_seen: dict[str, float] = {}
        self._sources: dict[str, Reader] = {}
        self._progress = Progress()
        self._ended: dict[str, bool] = {}  # all names that ended, in order, and whether a moment has listed them
        self._unreported: deque[tuple[str, Failure]] = deque()
        self._threads: list[threading.Thread] = []
        self._step = 0
        self._closed = False
        self._lock = threading.RLock()  # guards all of the above
        self._changed = threading.Condition(self._lock)
        self._queues = Queues(capacity, self._lock, self._changed, self.last_seen)
        self._feeder = Feeder(self._queues, self._stop_reading)
        for name, source in (sources or {}).items():
            self.add(name, source)

    @property
    def running(self) -> tuple[str, ...]:
        """Sources that are being read or still have batches queued."""
        with self._changed:
            return tuple(source.name for source in self._sources.values() if source.reading or source.queue)

    @property
    def failed(self) -> tuple[str, ...]:
        """Sources that have failed and were not restarted."""
        with self._changed:
            return tuple(source.name for source in self._sources.values() if source.failed)

    @property
    def lag(self) -> dict[str, float]:
        """Seconds for which each source that is being read has been awaited; 0 while its queue is full."""
        with self._changed:
            now = time.monotonic()
            return {
                source.name: 0.0 if source.awaited_since is None else now - source.awaited_since
                for source in self._sources.values()
                if source.reading
            }

    @property
    def queued(self) -> dict[str, int]:
        """The number of batches that are queued, by source."""
        with self._changed:
            return {reader.name: len(reader.queue) for reader in self._sources.values()}

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
        """Sources that have ended, those that never had a batch included."""
        with self._changed:
            return tuple(name for name, announced in self._ended.items() if announced)

    def add(self, name: str, source: Iterable[Any] | Source) -> None:
        """Add a source and start to read it. Names are unique: a task that has ended cannot start again."""
        with self._changed:
            if name in self._sources or name in self._ended:
                raise TaskError(f"there is or was a source {name!r}; add this one under another name")
            self._check_open(name)
            self._sources[name] = self._new_reader(name, as_source(source))

    def restart(self, name: str, source: Iterable[Any] | Source) -> None:
        """Resume a failed source with a new iterable or source; batches queued before are delivered first."""
        with self._changed:
            reader = self._find(name)
            if not reader.failed:
                raise TaskError(f"source {name!r} has not failed; only a failed source can be restarted")
            self._check_open(name)
            reader.source = as_source(source)
            self._keep(self._feeder.start(reader, reader.after))

    def remove(self, name: str) -> None:
        """End a source immediately and discard its queued batches."""
        with self._changed:
            reader = self._find(name)
            reader.stop()
            self._end(reader)
            self._changed.notify_all()

    def close(self, timeout: float = 1.0) -> None:
        """Stop all sources and join their threads for at most `timeout` seconds.

        A thread that is blocked in its source cannot be interrupted: it exits when the source next yields, at the
        latest with the program.
        """
        with self._changed:
            self._closed = True
            for reader in self._sources.values():
                reader.stop()
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
        with self._changed:
            self._step, self.delivered = state["step"], dict(state["delivered"])
            self._progress.load_state_dict(state)
            for name in self._ended:  # a source may have been exhausted before this call
                self._ended[name] = name not in self.delivered
            for name in state["ended"]:
                if name in self._sources:
                    reader = self._sources.pop(name)
                    reader.stop()
                    self._progress.restore_end(reader)
                self._ended[name] = True
            for name, reader in self._sources.items():
                reader.started = name in self.delivered
                if name in self._progress.positions and reader.can_be_read_again:
                    reader.stop()
                    self._sources[name] = self._new_reader(name, reader.source)
            self._changed.notify_all()

    def commit(self) -> None:
        """Let sources forget what they need no more; call it after a checkpoint with `state_dict()` is saved.

        That is what was delivered before the checkpoint before: the last two are both good to go on from.
        """
        with self._changed:
            forgettable = self._progress.forgettable(self._sources, self.ended)
        for source, position in forgettable:
            source.commit(position)

    def _find(self, name: str) -> Reader:
        if name not in self._sources:
            raise TaskError(f"there is no source {name!r} that has not ended; the sources are {list(self._sources)}")
        return self._sources[name]

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise SpclError(f"the stream is closed, so source {name!r} cannot be added; create a new LiveStream")

    def _new_reader(self, name: str, source: Source) -> Reader:
        reader = Reader(name, source, name in self.delivered, self._queues)
        self._keep(self._feeder.start(reader, self._progress.positions.get(name)))
        return reader

    def _keep(self, thread: threading.Thread) -> None:
        self._threads = [*{each for each in self._threads if each.is_alive()} | {thread}]

    def _stop_reading(self, reader: Reader, error: BaseException | None) -> None:
        with self._changed:
            reader.reading, reader.awaited_since = False, None
            if error is not None and not reader.stopped:
                reader.failed = True
                count = self.failures[reader.name].count + 1 if reader.name in self.failures else 1
                failure = self.failures[reader.name] = Failure(error, time.time(), count)
                self._unreported.append((reader.name, failure))
            if reader.exhausted and not reader.stopped:
                self._end(reader)
            self._changed.notify_all()

    def _next(self) -> Moment | None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_event, self.patience)
                report = None if self._closed else self._next_report()
                if report is None:
                    return self._collect()
            report()  # one at a time, as the call may raise

    def _next_report(self) -> Callable[[], object] | None:
        """Return the call that reports the next failure or rejected message, if there is one."""
        if self._unreported:
            return partial(self.on_failure, *self._unreported.popleft())
        for name, reader in self._sources.items():
            if reader.rejects:
                rejected = cast(Rejected, reader.take())
                self._progress.positions[name] = rejected.position
                if reader.exhausted:
                    self._end(reader)
                self._changed.notify_all()
                return partial(self.on_rejected, name, rejected)
        return None

    def _has_event(self) -> bool:
        self._feeder.deliver()
        readers = self._sources.values()
        return (
            self._closed
            or bool(self._unreported)
            or not all(self._ended.values())
            or any(reader.rejects for reader in readers)
            or self._has_batches()
            or not (self.keep_open or any(reader.reading for reader in readers))
        )

    def _has_batches(self) -> bool:
        """Whether a moment can have batches now."""
        readers = self._sources.values()
        waiting = self.together and any(reader.reading and not reader.has_batch for reader in readers)
        return not waiting and any(reader.has_batch for reader in readers)

    def _collect(self) -> Moment | None:
        if self._closed:
            return None
        batches = {}
        # Together, a task that has ended is finished before the next step, whenever its end became known.
        if self._has_batches() and not (self.together and not all(self._ended.values())):
            batches = {name: self._take(reader) for name, reader in self._sources.items() if reader.has_batch}
        started = tuple(name for name in batches if not self._sources[name].started)
        for name in batches:
            self._sources[name].started = True
            self.delivered[name] = self.delivered.get(name, 0) + 1
        for reader in [reader for reader in self._sources.values() if reader.exhausted]:
            self._end(reader)
        ended = tuple(name for name, announced in self._ended.items() if not announced)
        self._ended.update(dict.fromkeys(ended, True))
        if not (batches or ended):
            return None
        self._changed.notify_all()
        self._step += 1
        return Moment(self._step - 1, batches, started, ended)

    def _take(self, reader: Reader) -> Batch:
        message = cast(Message, reader.take())
        if reader.can_be_read_again:
            self._progress.positions[reader.name] = message.position
        return message.batch

    def _end(self, reader: Reader) -> None:
        """Remove the source; the next moment lists it in `ended` if one has listed it in `started`."""
        del self._sources[reader.name]
        self._progress.end(reader)
        self._ended[reader.name] = not reader.started
