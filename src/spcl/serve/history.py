"""Bounded history of a service: totals, a time series that gets coarser as it grows, and the latest events."""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spcl.serve.buckets import Bucket
from spcl.serve.events import CheckpointEvent, DeadLetterEvent, Event, StepEvent, TaskEvent

__all__ = ["Changes", "Cursor", "History", "Totals"]

NAMES: Mapping[type, str] = {TaskEvent: "task", CheckpointEvent: "checkpoint", DeadLetterEvent: "dead-letter"}


@dataclass
class Totals:
    """Counts since the start of the process, and the latest values.

    Attributes:
        steps: the number of steps.
        seconds: the time spent in steps.
        samples, skipped, dead_letters: by task, counts.
        losses, accuracies: by task, the latest values.
        kappa_before, kappa_after: of the latest step that has them.
        checkpoint: the latest checkpoint.
    """

    steps: int = 0
    seconds: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    accuracies: dict[str, float] = field(default_factory=dict)
    kappa_before: float | None = None
    kappa_after: float | None = None
    checkpoint: CheckpointEvent | None = None

    def add(self, event: Event) -> None:
        """Count an event."""
        if isinstance(event, StepEvent):
            self.steps += 1
            self.seconds += event.seconds
            _count(self.samples, event.samples)
            _count(self.skipped, dict.fromkeys(event.skipped, 1))
            self.losses.update(event.losses)
            self.accuracies.update(event.accuracies)
            if event.kappa_before is not None:
                self.kappa_before, self.kappa_after = event.kappa_before, event.kappa_after
        elif isinstance(event, CheckpointEvent):
            self.checkpoint = event
        elif isinstance(event, DeadLetterEvent):
            _count(self.dead_letters, {event.task: 1})


@dataclass(frozen=True)
class Cursor:
    """How far a reader has read: the interval of the buckets, the start of the latest one, the number of events."""

    interval: float = 0.0
    start: float = 0.0
    events: int = 0


@dataclass(frozen=True)
class Changes:
    """What a reader has not seen yet.

    Attributes:
        reset: whether the buckets replace all that the reader has, because they have become longer.
        interval: the length of a bucket in seconds.
        buckets: those that are new or have changed, as plain data; the first replaces the reader's latest one.
        events: pairs of name and plain data, the oldest first.
        cursor: to go on from.
    """

    reset: bool
    interval: float
    buckets: list[dict[str, Any]]
    events: list[tuple[str, dict[str, Any]]]
    cursor: Cursor


class History:
    """What happened since the process started, in bounded memory; all methods may be called from any thread.

    Steps are gathered in buckets of one second. When there are too many, neighbours are merged and buckets become twice
    as long, so that the series always covers the whole time.

    Args:
        points: the largest number of buckets.
        events: how many of the latest events are kept.
        clock: the time in seconds since the epoch.

    >>> history = History(points=2, clock=lambda: 0.0)
    >>> for second in range(5):
    ...     history.add(StepEvent(second, second, {"camera": 8}, {"camera": 0.5}, {}, 4.0, 1.0, (), 0.01))
    >>> changes = history.since(Cursor())
    >>> changes.interval, [bucket["samples"] for bucket in changes.buckets]
    (4.0, [{'camera': 32}, {'camera': 8}])
    >>> history.since(changes.cursor).events
    []
    """

    def __init__(self, points: int = 300, events: int = 200, clock: Callable[[], float] = time.time) -> None:
        self._points = points
        self._clock = clock
        self._lock = threading.Lock()
        self._totals = Totals()
        self._interval = 1.0
        self._buckets: list[Bucket] = []
        self._events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=events)
        self._event_count = 0

    def add(self, event: Event) -> None:
        """Include an event."""
        with self._lock:
            self._totals.add(event)
            if isinstance(event, StepEvent):
                self._bucket(event.time).add(event)
            else:
                self._events.append((NAMES[type(event)], asdict(event)))
                self._event_count += 1

    def add_lags(self, lags: Mapping[str, float]) -> None:
        """Include the present lags of tasks, in seconds."""
        with self._lock:
            self._bucket(self._clock()).add_lags(lags)

    def totals(self) -> Totals:
        """Return a copy of the totals."""
        with self._lock:
            return copy.deepcopy(self._totals)

    def since(self, cursor: Cursor) -> Changes:
        """Return what is new since a cursor; since ``Cursor()`` everything."""
        with self._lock:
            reset = cursor.interval != self._interval
            changed = [bucket for bucket in self._buckets if reset or bucket.start >= cursor.start]
            new = min(self._event_count - cursor.events, len(self._events))
            start = changed[-1].start if changed else cursor.start
            return Changes(
                reset,
                self._interval,
                [bucket.as_json() for bucket in changed],
                list(self._events)[len(self._events) - new :],
                Cursor(self._interval, start, self._event_count),
            )

    def _bucket(self, moment: float) -> Bucket:
        """Return the bucket of a moment, by default the latest one: time does not run backwards."""
        start = moment - moment % self._interval
        if not self._buckets or start > self._buckets[-1].start:
            self._buckets.append(Bucket(start))
            while len(self._buckets) > self._points:
                self._coarsen()
        return self._buckets[-1]

    def _coarsen(self) -> None:
        self._interval *= 2.0
        finer, self._buckets = self._buckets, []
        for bucket in finer:
            start = bucket.start - bucket.start % self._interval
            if self._buckets and self._buckets[-1].start == start:
                self._buckets[-1].merge(bucket)
            else:
                bucket.start = start
                self._buckets.append(bucket)


def _count(totals: dict[str, int], more: Mapping[str, int]) -> None:
    for name, number in more.items():
        totals[name] = totals.get(name, 0) + number
