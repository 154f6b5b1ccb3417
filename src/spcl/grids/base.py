"""What a grid, the pool that makes its runs and the view that shows them say to each other."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from spcl.grids.plan import Job


@dataclass(frozen=True)
class JobMessage:
    """A message about a job: ``step``, ``done``, ``busy``, ``interrupted``, ``failed`` or ``lost``.

    The values of ``step`` are the fields of :class:`Running`; of ``done`` ``summary`` and ``skipped``, see
    :meth:`GridView.finished`; of ``failed`` the arguments of :func:`failure`. A run is ``busy`` while another process
    makes it, and ``lost``, for a ``reason``, when the machine that made it is gone: the run did not fail, and is made
    again.
    """

    job: Job
    event: str
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, sent: dict[str, Any]) -> Self:
        """Return what a worker sent, its values with the event among them, as a message about its job."""
        return cls(job, sent["event"], {name: value for name, value in sent.items() if name != "event"})


def failure(reason: str, details: str = "", user_error: bool = False, out_of_memory: bool = False) -> dict[str, Any]:
    """Return a ``failed`` message as workers send it.

    Args:
        reason: why the run failed, in a sentence.
        details: a traceback, or what the process printed.
        user_error: whether the user has to correct something, so that a retry is useless.
        out_of_memory: whether memory was (probably) exhausted.
    """
    values = {"reason": reason, "details": details, "user_error": user_error, "out_of_memory": out_of_memory}
    return {"event": "failed", **values}


class Pool(Protocol):
    """Makes runs side by side, on this machine or on others; leaving the ``with`` block closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def has_room(self) -> bool:
        """Return whether another job can start now."""
        ...

    def start(self, job: Job) -> None:
        """Start the job."""
        ...

    def next_message(self, timeout: float) -> JobMessage | None:
        """Return the next message about a job, or None if there is none within ``timeout`` seconds."""
        ...

    def close(self) -> None:
        """Let every run save itself, and wait for it."""
        ...


@dataclass
class Running:
    """The progress of one run: its step, the number of steps once known, and the cluster node that makes it."""

    step: int = 0
    steps: int | None = None
    node: str | None = None


@dataclass
class GridState:
    """The progress of a grid.

    Attributes:
        total: the number of jobs.
        done: the number of complete jobs.
        done_before: the number of jobs that were complete at the start.
        running: the progress of the jobs that run now, by name.
        busy: the names of jobs that another process runs.
        failed: the names of jobs that failed, and why.
        out_of_memory: whether a job failed because memory was exhausted, as far as known.
        started: when the grid started, by the monotonic clock.
    """

    total: int
    done: int = 0
    done_before: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    out_of_memory: bool = False
    started: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float | None:
        """Estimate the remaining time from the pace so far; None while nothing has been done."""
        begun = sum(running.step / running.steps for running in self.running.values() if running.steps)
        made = self.done - self.done_before + begun
        left = self.total - len(self.failed) - self.done - begun
        return (time.monotonic() - self.started) / made * left if made else None


class GridView(Protocol):
    """Receives the progress events of a grid."""

    def tick(self, state: GridState) -> None:
        """Update the view, a few times a second."""
        ...

    def finished(self, job: Job, state: GridState, summary: str, skipped: int) -> None:
        """Show a complete run: its A and F as text, and how often a task was skipped for non-finite values."""
        ...

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        """Show a failed run; ``again`` says whether it will be retried."""
        ...

    def lost(self, job: Job, state: GridState, reason: str, begun: bool) -> None:
        """Show a run that was lost with its machine; ``begun`` says whether a checkpoint is left to resume from."""
        ...
