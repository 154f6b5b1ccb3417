"""A stream over sources that run concurrently, each at its own speed."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from spcl.batches import Batch, as_batch, describe, number_of_samples
from spcl.errors import DataError, SpclError, TaskError
from spcl.streams.moment import Moment

__all__ = ["Failure", "LiveStream"]

_END = object()


@dataclass(frozen=True)
class Failure:
    """The last exception of a source, its time (`time.time()`), and the number of exceptions so far."""

    exception: BaseException
    time: float
    count: int


@dataclass(eq=False)
class _Source:
    name: str
    started: bool  # a moment has listed it in `started`
    queue: deque[Batch] = field(default_factory=deque)
    awaited_since: float | None = None  # when its thread began to wait for the next batch; None while it does not
    reading: bool = True  # its thread may still append; False once exhausted or failed
    failed: bool = False
    stopped: bool = False  # its thread must exit

    @property
    def exhausted(self) -> bool:
        return not (self.reading or self.failed or self.queue)


def _log_failure(name: str, failure: Failure) -> None:
    logging.getLogger(__name__).warning("source %r failed (%d×): %r", name, failure.count, failure.exception)


class LiveStream:
    """Moments of named sources that run concurrently: generators, DataLoaders, any iterable of `(x, y)` batches.

    Each source is read by its own thread into its own queue. A moment holds at most one batch of each source, of those
    that have one queued; iteration blocks only while all queues are empty. So a slow source does not delay the others,
    and a source that is faster than the learner is paused when `capacity` batches are queued.

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

    Args:
        sources: The first sources by name; their threads start immediately.
        capacity: The largest number of queued batches per source.
        patience: Seconds to wait for a batch or another event before iteration ends; None waits without limit.
        keep_open: Wait for sources to be added or restarted when none is running, instead of ending the iteration.
        on_failure: Called as `on_failure(name, failure)` in the iterating thread, before the next moment; it may call
            `restart` or raise. By default the failure is logged as a warning.

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
        sources: Mapping[str, Iterable[Any]] | None = None,
        *,
        capacity: int = 4,
        patience: float | None = None,
        keep_open: bool = False,
        on_failure: Callable[[str, Failure], None] = _log_failure,
    ) -> None:
        if not isinstance(sources, Mapping | None):
            raise SpclError(f"sources is a {type(sources).__name__}; give a dict of iterables by name")
        if not isinstance(capacity, int) or capacity < 1:
            raise SpclError(f"capacity is {capacity!r}; give an integer number of batches, at least 1")
        if patience is not None and not _is_timeout(patience):
            raise SpclError(f"patience is {patience!r}; give a number of seconds, or None to wait without limit")
        if not callable(on_failure):
            raise SpclError(f"on_failure is {on_failure!r}; give a function of the source's name and its Failure")
        self.capacity = capacity
        self.patience = patience
        self.keep_open = keep_open
        self.on_failure = on_failure
        self.failures: dict[str, Failure] = {}
        self.delivered: dict[str, int] = {}
        self.last_seen: dict[str, float] = {}
        self._sources: dict[str, _Source] = {}
        self._ended: dict[str, bool] = {}  # all names that ended, in order, and whether a moment has listed them
        self._unreported: deque[tuple[str, Failure]] = deque()
        self._threads: list[threading.Thread] = []
        self._step = 0
        self._closed = False
        self._changed = threading.Condition()  # guards all of the above, and is notified of every change
        for name, iterable in (sources or {}).items():
            self.add(name, iterable)

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

    def add(self, name: str, iterable: Iterable[Any]) -> None:
        """Add a source and start to read it. Names are unique: a task that has ended cannot start again."""
        with self._changed:
            if name in self._sources or name in self._ended:
                raise TaskError(f"there is or was a source {name!r}; add this one under another name")
            source = _Source(name, started=name in self.delivered)
            self._start_reading(source, iterable)
            self._sources[name] = source

    def restart(self, name: str, iterable: Iterable[Any]) -> None:
        """Resume a failed source with a new iterable; batches queued before are delivered first."""
        with self._changed:
            source = self._find(name)
            if not source.failed:
                raise TaskError(f"source {name!r} has not failed; only a failed source can be restarted")
            self._start_reading(source, iterable)
            source.failed, source.reading = False, True

    def remove(self, name: str) -> None:
        """End a source immediately and discard its queued batches."""
        with self._changed:
            source = self._find(name)
            source.stopped = True
            self._end(source)
            self._changed.notify_all()

    def close(self, timeout: float = 1.0) -> None:
        """Stop all sources and join their threads for at most `timeout` seconds.

        A thread that is blocked in its source cannot be interrupted: it exits when the source next yields, at the
        latest with the program.
        """
        with self._changed:
            self._closed = True
            for source in self._sources.values():
                source.stopped = True
                source.queue.clear()
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
        """Return the step, the number of batches delivered per source, and the sources that have ended.

        Sources cannot be rewound: on resuming, the caller skips the batches that were delivered; batches that were read
        but not delivered are lost.
        """
        with self._changed:
            ended = [name for name, announced in self._ended.items() if announced]
            return {"step": self._step, "delivered": dict(self.delivered), "ended": ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`; call it before the first moment is taken.

        Tasks that had started are not listed in `started` again, and sources of tasks that had ended are removed.
        """
        with self._changed:
            self._step = state["step"]
            self.delivered = dict(state["delivered"])
            for source in self._sources.values():
                source.started = source.name in self.delivered
            for name in self._ended:  # a source may have been exhausted before this call
                self._ended[name] = name not in self.delivered
            for name in state["ended"]:
                if name in self._sources:
                    self._sources.pop(name).stopped = True
                self._ended[name] = True
            self._changed.notify_all()

    def _find(self, name: str) -> _Source:
        if name not in self._sources:
            raise TaskError(f"there is no source {name!r} that has not ended; the sources are {list(self._sources)}")
        return self._sources[name]

    def _start_reading(self, source: _Source, iterable: Iterable[Any]) -> None:
        if self._closed:
            raise SpclError(f"the stream is closed, so source {source.name!r} cannot be added; create a new LiveStream")
        thread = threading.Thread(target=self._read, args=(source, iterable), name=f"source {source.name}", daemon=True)
        source.awaited_since = time.monotonic()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def _read(self, source: _Source, iterable: Iterable[Any]) -> None:
        try:
            iterator = iter(iterable)
            while self._wait_for_capacity(source) and (batch := next(iterator, _END)) is not _END:
                self._put(source, _checked(batch))
        except BaseException as error:  # also SystemExit: otherwise a dead source would look like a slow one
            self._stop_reading(source, error)
        else:
            self._stop_reading(source, None)

    def _wait_for_capacity(self, source: _Source) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: source.stopped or len(source.queue) < self.capacity)
            source.awaited_since = time.monotonic()
            return not source.stopped

    def _put(self, source: _Source, batch: Batch) -> None:
        with self._changed:
            source.queue.append(batch)
            source.awaited_since = None
            self.last_seen[source.name] = time.time()
            self._changed.notify_all()

    def _stop_reading(self, source: _Source, error: BaseException | None) -> None:
        with self._changed:
            source.reading, source.awaited_since = False, None
            if error is not None and not source.stopped:
                source.failed = True
                count = self.failures[source.name].count + 1 if source.name in self.failures else 1
                failure = self.failures[source.name] = Failure(error, time.time(), count)
                self._unreported.append((source.name, failure))
            if source.exhausted and not source.stopped:
                self._end(source)
            self._changed.notify_all()

    def _next(self) -> Moment | None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_event, self.patience)
                if not self._unreported or self._closed:
                    return self._collect()
                name, failure = self._unreported.popleft()  # one at a time, as the call may raise
            self.on_failure(name, failure)

    def _has_event(self) -> bool:
        sources = self._sources.values()
        return (
            self._closed
            or bool(self._unreported)
            or not all(self._ended.values())
            or any(source.queue for source in sources)
            or not (self.keep_open or any(source.reading for source in sources))
        )

    def _collect(self) -> Moment | None:
        if self._closed:
            return None
        batches = {name: source.queue.popleft() for name, source in self._sources.items() if source.queue}
        started = tuple(name for name in batches if not self._sources[name].started)
        for name in batches:
            self._sources[name].started = True
            self.delivered[name] = self.delivered.get(name, 0) + 1
        for source in [source for source in self._sources.values() if source.exhausted]:
            self._end(source)
        ended = tuple(name for name, announced in self._ended.items() if not announced)
        self._ended.update(dict.fromkeys(ended, True))
        if not (batches or ended):
            return None
        self._changed.notify_all()
        self._step += 1
        return Moment(self._step - 1, batches, started, ended)

    def _end(self, source: _Source) -> None:
        """Remove the source; the next moment lists it in `ended` if one has listed it in `started`."""
        del self._sources[source.name]
        self._ended[source.name] = not source.started


def _is_timeout(seconds: object) -> bool:
    return isinstance(seconds, int | float) and 0 <= seconds <= threading.TIMEOUT_MAX


def _checked(batch: Any) -> Batch:
    x, y = as_batch(batch)
    if y.dim() == 0 or not number_of_samples(x) == len(y) > 0:
        shape = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else describe(x)
        raise DataError(f"the source yielded x {shape} and y of shape {tuple(y.shape)}; yield one y per x")
    return x, y
