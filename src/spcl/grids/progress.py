"""The progress of a grid, and the interface of views that follow it."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from spcl.grids.plan import Job

__all__ = ["GridState", "GridView", "Running"]


@dataclass
class Running:
    """The progress of one run: its step and the number of steps, once known, and its node of a cluster."""

    step: int = 0
    steps: int | None = None
    node: str | None = None


@dataclass
class GridState:
    """The progress of a grid.

    Attributes:
        total: the number of jobs.
        done: how many of them are complete.
        done_before: how many of those were complete at the start.
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
    """Receive the progress events of a grid."""

    def tick(self, state: GridState) -> None:
        """Update the view, a few times a second."""
        ...

    def finished(self, job: Job, state: GridState, summary: str, skipped: int) -> None:
        """Show a complete run: its A and F as text, and how often a task was skipped because of non-finite values."""
        ...

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        """Show a run that failed; ``again`` says whether it will be retried."""
        ...

    def lost(self, job: Job, state: GridState, reason: str, begun: bool) -> None:
        """Show a run that was lost with its machine; ``begun`` says whether a checkpoint is left to go on from."""
        ...
