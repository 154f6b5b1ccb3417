"""What a service says of itself: events, its status, and a bounded history of the events."""

import copy
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from spcl._util.registry import Named
from spcl.tasks import Kind

# -- events


@dataclass(frozen=True)
class StepEvent:
    """One step of the learner.

    Attributes:
        time: when it ended (``time.time()``).
        step: its number, from 0.
        samples: the new samples of every task that learned in it.
        losses: the loss of every gradient: of a task, or of ``"memory"``.
        accuracies: prequential accuracy, from 0 to 1, of the classifiers that were tested on their batch before they
            were trained on it; empty in most moments where testing would take too much time.
        kappa_before: condition number κ of the gradients; NaN where all of them are zero, None where the method
            computed none, and in most moments where it would take too much time.
        kappa_after: κ of the adjusted gradients.
        skipped: the gradients that were not finite.
        seconds: how long the step took.
    """

    time: float
    step: int
    samples: dict[str, int]
    losses: dict[str, float]
    accuracies: dict[str, float]
    kappa_before: float | None
    kappa_after: float | None
    skipped: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class TaskEvent:
    """What happened to a task.

    It started or ended, got messages after its end, or its source cannot be read or can be read again. A refused
    request, and a setting that has changed since the last start, have no task, only the text.
    """

    time: float
    task: str
    kind: Literal["started", "ended", "late", "failed", "recovered", "refused", "changed"]
    text: str


@dataclass(frozen=True)
class CheckpointEvent:
    """A saved checkpoint: the number of steps before it, the seconds that saving took, and its size."""

    time: float
    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class SaveFailedEvent:
    """A checkpoint that could not be saved, the number of steps before it, and why; the first of several in a row."""

    time: float
    step: int
    reason: str


@dataclass(frozen=True)
class DeadLetterEvent:
    """A message that cannot be learned, its position in the task's stream, and the reason."""

    time: float
    task: str
    position: str
    reason: str


Event = StepEvent | TaskEvent | CheckpointEvent | SaveFailedEvent | DeadLetterEvent


# -- status

TaskState = Literal["waiting", "running", "silent", "failed", "finished"]


@dataclass(frozen=True)
class TaskStatus:
    """The state of a source of a task.

    Attributes:
        name: its name.
        task: the name of its task, which other sources may answer, too.
        encoder: the name of its encoder, or its name and options; None for none.
        kind: what its targets are; None while it is not known.
        classes: the number of its classes, labels or numbers; None while it is not known.
        state: waiting to be announced, running, silent (running, without batches for long), failed (its source cannot
            be read, now or for good) or finished.
        batches: how many batches were learned.
        samples: how many samples were in them.
        skipped: how many batches were skipped, because loss or gradient were not finite.
        lag_seconds: how long the next batch has been awaited; 0 while batches are queued.
        backlog: how many messages wait in the hub.
        last_seen: when the last message came (``time.time()``); None before the first of this process.
        dead_letters: how many messages could not be learned.
        late: how many messages were not learned because the task had ended; known when the hub deletes its stream.
        waits_for: what has to happen before the task begins or ends, in words; None while it waits for nothing.
    """

    name: str
    task: str
    encoder: Named | None
    kind: Kind | None
    classes: int | None
    state: TaskState
    batches: int
    samples: int
    skipped: int
    lag_seconds: float
    backlog: int
    last_seen: float | None
    dead_letters: int
    late: int
    waits_for: str | None = None


@dataclass(frozen=True)
class Status:
    """The state of a service, all of it at the same time.

    Attributes:
        tasks: all sources ever seen, in that order.
        steps: of the learner, since it began.
        samples: that were learned, since it began.
        memory_samples: samples in memory.
        memory_bytes: size of the memory's content.
        checkpoint_time: of the last checkpoint (``time.time()``); None before the first.
        checkpoint_age: seconds since then.
        uptime: seconds since the service began to run; 0 before.
        running: whether it runs, or else loads its state or stands by.
        beat_age: seconds since training last moved on.
        hub_away: seconds for which the hub has not answered; 0 while it does.
        unsaved: age in seconds of the oldest thing that is in no checkpoint; 0 where there is none.
        save_failures: how many checkpoints could not be saved, since the service began to run.
        faults: what keeps the service from its work; it is ready while there are none.
        refused_names: why tasks of the hub are not learned whose names are impossible; at most 20.
    """

    tasks: list[TaskStatus]
    steps: int
    samples: int
    memory_samples: int
    memory_bytes: int
    checkpoint_time: float | None
    checkpoint_age: float | None
    uptime: float
    running: bool
    beat_age: float = 0.0
    hub_away: float = 0.0
    unsaved: float = 0.0
    save_failures: int = 0
    faults: tuple[str, ...] = ()
    refused_names: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain data; the values are shared, not copied.

        >>> Status([], 0, 0, 0, 0, None, None, 0.0, running=False).as_json()["tasks"]
        []
        """
        return vars(self) | {"tasks": [vars(task) for task in self.tasks]}


# -- history


@dataclass
class Mean:
    """Sum and number of finite values.

    >>> mean = Mean()
    >>> for value in (1.0, 3.0, float("nan")):
    ...     mean.add(value)
    >>> mean.value
    2.0
    """

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        """Include a value; None and what is not finite are left out."""
        if value is not None and math.isfinite(value):
            self.total += value
            self.count += 1

    def merge(self, other: "Mean") -> None:
        """Include the values of another."""
        self.total += other.total
        self.count += other.count

    @property
    def value(self) -> float | None:
        """The mean; None without values."""
        return self.total / self.count if self.count else None


Means = dict[str, Mean]


@dataclass
class Bucket:
    """What happened in an interval of time: sums, and means by task; of κ the mean of its logarithm.

    Attributes:
        start: the beginning of the interval, in seconds since the epoch.
        steps: the number of steps.
        skipped: the number of batches that were skipped because they were not finite.
        seconds: the time spent in steps.
        samples: by task, the number of samples.
        losses, accuracies: by task, means.
        lags: by task, the largest lag in seconds.
        kappas: ``before`` and ``after``: means of log κ.
    """

    start: float
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    losses: Means = field(default_factory=dict)
    accuracies: Means = field(default_factory=dict)
    lags: dict[str, float] = field(default_factory=dict)
    kappas: Means = field(default_factory=dict)
    _json: str | None = None

    def add(self, event: StepEvent) -> None:
        """Include a step."""
        self._json = None
        self.steps += 1
        self.skipped += len(event.skipped)
        self.seconds += event.seconds
        for task, count in event.samples.items():
            self.samples[task] = self.samples.get(task, 0) + count
        for means, values in ((self.losses, event.losses), (self.accuracies, event.accuracies)):
            for task, value in values.items():
                means.setdefault(task, Mean()).add(value)
        for name, kappa in (("before", event.kappa_before), ("after", event.kappa_after)):
            if kappa is not None and kappa > 0.0:
                self.kappas.setdefault(name, Mean()).add(math.log(kappa))

    def add_lags(self, lags: Mapping[str, float]) -> None:
        """Include lags; of every task the largest stays."""
        self._json = None
        for task, lag in lags.items():
            self.lags[task] = max(lag, self.lags.get(task, 0.0))

    def merge(self, other: "Bucket") -> None:
        """Include the interval that follows."""
        self._json = None
        self.steps += other.steps
        self.skipped += other.skipped
        self.seconds += other.seconds
        for task, count in other.samples.items():
            self.samples[task] = self.samples.get(task, 0) + count
        self.add_lags(other.lags)
        for mine, theirs in (
            (self.losses, other.losses),
            (self.accuracies, other.accuracies),
            (self.kappas, other.kappas),
        ):
            for name, mean in theirs.items():
                mine.setdefault(name, Mean()).merge(mean)

    def as_json(self) -> str:
        """Return JSON: means as numbers, κ itself. Made once, until something is added."""
        self._json = self._json or json.dumps(self._plain(), separators=(",", ":"))
        return self._json

    def move(self, start: float) -> None:
        """Let the interval begin earlier."""
        self.start, self._json = start, None

    def _plain(self) -> dict[str, Any]:
        kappas = {name: math.exp(value) for name, value in _values(self.kappas).items()}
        return {
            "start": self.start,
            "steps": self.steps,
            "skipped": self.skipped,
            "samples": dict(self.samples),
            "losses": _rounded(_values(self.losses)),
            "accuracies": _rounded(_values(self.accuracies)),
            "lags": _rounded(self.lags),
            "kappas": _rounded(kappas),
        }


def _values(means: Means) -> dict[str, float]:
    return {name: value for name, mean in means.items() if (value := mean.value) is not None}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Return values with five digits, which are enough to draw and a third of the bytes."""
    return {name: float(f"{value:.5g}") for name, value in values.items()}


NAMES: Mapping[type, str] = {
    TaskEvent: "task",
    CheckpointEvent: "checkpoint",
    SaveFailedEvent: "save-failed",
    DeadLetterEvent: "dead-letter",
}


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
        buckets: the buckets that are new or have changed, as JSON; the first replaces the reader's latest one.
        events: pairs of name and plain data, the oldest first.
        cursor: where the reader's next call starts.
    """

    reset: bool
    interval: float
    buckets: list[str]
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

    >>> import json
    >>> history = History(points=2, clock=lambda: 0.0)
    >>> for second in range(5):
    ...     history.add(StepEvent(second, second, {"camera": 8}, {"camera": 0.5}, {}, 4.0, 1.0, (), 0.01))
    >>> changes = history.since(Cursor())
    >>> changes.interval, [json.loads(bucket)["samples"] for bucket in changes.buckets]
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
        return self.since_each(cursor)[0]

    def since_each(self, *cursors: Cursor) -> list[Changes]:
        """Return what is new since each of several cursors, all up to the same time."""
        with self._lock:
            return [self._since(cursor) for cursor in cursors]

    def _since(self, cursor: Cursor) -> Changes:
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
                bucket.move(start)
                self._buckets.append(bucket)


def _count(totals: dict[str, int], more: Mapping[str, int]) -> None:
    for name, number in more.items():
        totals[name] = totals.get(name, 0) + number
