"""Making many runs: what is missing is made, what is done is left alone, what crashes is tried again."""

import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from spcl.grids.plan import Job
from spcl.grids.pool import Message, WorkerPool
from spcl.runs.record import RunFolder, write_json

__all__ = ["FAILURE", "GridState", "GridView", "Running", "run_jobs"]

FAILURE = "failure.json"
TICK_SECONDS = 0.2
BUSY_SECONDS = 1.0


@dataclass
class Running:
    """How far a run is."""

    step: int = 0
    steps: int | None = None


@dataclass
class GridState:
    """How far a grid is.

    Attributes:
        total: the number of jobs.
        done: how many of them are complete.
        done_before: how many of those were so at the start.
        running: the jobs that are being made, by name.
        busy: the names of jobs that another process is making.
        failed: the names of jobs that could not be made, and why.
    """

    total: int
    done: int = 0
    done_before: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float | None:
        """How long the rest takes if it goes on like this; None as long as nothing can be said."""
        begun = sum(running.step / running.steps for running in self.running.values() if running.steps)
        made = self.done - self.done_before + begun
        left = self.total - len(self.failed) - self.done - begun
        return (time.monotonic() - self.started) / made * left if made else None


class GridView(Protocol):
    """Told how a grid goes."""

    def tick(self, state: GridState) -> None:
        """Some time has passed."""
        ...

    def finished(self, job: Job, state: GridState, accuracy: float, forgetting: float, left_out: int) -> None:
        """A run is complete; so often a task was left out of a step, because something was not finite."""
        ...

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        """A run did not come to its end; ``again`` says whether it will be tried once more."""
        ...


def run_jobs(jobs: Iterable[Job], pool: WorkerPool, view: GridView, retries: int = 1) -> GridState:
    """Make the runs that are not complete yet, as many at once as the pool has processes.

    A run that crashes is tried again up to ``retries`` times; why it failed is kept in ``failure.json`` in its folder
    until it succeeds. A run that another process is making is left to that process, and looked at again.
    """
    return _Grid(list(jobs), pool, view, retries).to_the_end()


class _Grid:
    def __init__(self, jobs: list[Job], pool: WorkerPool, view: GridView, retries: int) -> None:
        self.pool, self.view, self.retries = pool, view, retries
        done = {job.name: job for job in jobs if job.is_done()}
        for job in done.values():
            _tidy(job)
        self.waiting = deque(job for job in jobs if job.name not in done)
        self.later: deque[tuple[float, Job]] = deque()
        self.failures: Counter[str] = Counter()
        self.state = GridState(len(jobs), len(done), len(done))

    def to_the_end(self) -> GridState:
        while self.waiting or self.later or self.state.running:
            self._look_again()
            self._start_some()
            message = self.pool.next_message(TICK_SECONDS)
            if message is not None:
                self._hear(message)
            self.view.tick(self.state)
        return self.state

    def _look_again(self) -> None:
        while self.later and self.later[0][0] <= time.monotonic():
            self.waiting.append(self.later.popleft()[1])

    def _start_some(self) -> None:
        while self.waiting and self.pool.has_room():
            job = self.waiting.popleft()
            self.state.running[job.name] = Running()
            self.pool.start(job)

    def _hear(self, message: Message) -> None:
        job, values = message.job, message.values
        if message.event == "step":
            self.state.busy.discard(job.name)
            self.state.running[job.name] = Running(values["step"], values["steps"])
            return
        del self.state.running[job.name]
        match message.event:
            case "done":
                self._done(job, values["accuracy"], values["forgetting"], values["left_out"])
            case "busy":
                self.state.busy.add(job.name)
                self.later.append((time.monotonic() + BUSY_SECONDS, job))
            case "interrupted":
                self._failed(job, values["reason"], "", mendable=False)
            case "failed":
                self._failed(job, values["reason"], values["details"], values["mendable"])

    def _done(self, job: Job, accuracy: float, forgetting: float, left_out: int) -> None:
        self.state.done += 1
        self.state.busy.discard(job.name)
        _tidy(job)
        self.view.finished(job, self.state, accuracy, forgetting, left_out)

    def _failed(self, job: Job, reason: str, details: str, mendable: bool) -> None:
        self.failures[job.name] += 1
        attempts = self.failures[job.name]
        again = not mendable and attempts <= self.retries
        if again:
            self.waiting.append(job)
        else:
            self.state.failed[job.name] = reason
        content = {"reason": reason, "attempts": attempts, "time": datetime.now(UTC).isoformat(), "details": details}
        with suppress(OSError):  # the folder itself may be what is wrong
            job.out.mkdir(parents=True, exist_ok=True)
            write_json(job.out / FAILURE, content)
        self.view.failed(job, self.state, reason, again)


def _tidy(job: Job) -> None:
    """Remove from the folder of a complete run what it needed on the way; it may have been killed at its very end."""
    with suppress(OSError):
        RunFolder(job.out).drop_checkpoints()
        (job.out / FAILURE).unlink(missing_ok=True)
