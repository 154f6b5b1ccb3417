"""The progress of a grid, and views that show it: a live picture for terminals, plain lines for logs."""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spcl.grids.plan import Job


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


class SilentGridView:
    """A view that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tick(self, state: GridState) -> None:
        """Do nothing."""

    def finished(self, job: Job, state: GridState, summary: str, skipped: int) -> None:
        """Do nothing."""

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        """Do nothing."""

    def lost(self, job: Job, state: GridState, reason: str, begun: bool) -> None:
        """Do nothing."""


class PlainGridView(SilentGridView):
    """Print a line for every run that ends, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def finished(self, job: Job, state: GridState, summary: str, skipped: int) -> None:
        """Print accuracy, forgetting, skipped tasks and the time left."""
        facts = [summary, _skipped_note(skipped), _time_left(state)]
        self._print(state, f"{job.name}: {', '.join(filter(None, facts))}")

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        """Print the reason."""
        self._print(state, f"{job.name}: {'crashed, will be retried' if again else 'failed'}: {reason}")

    def lost(self, job: Job, state: GridState, reason: str, begun: bool) -> None:
        """Print the reason, and where the run resumes."""
        self._print(state, f"{job.name}: {_lost_note(begun)}: {reason}")

    def _print(self, state: GridState, line: str) -> None:
        width = len(str(state.total))
        self._console.print(
            f"{state.done:>{width}}/{state.total}  {line}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


class LiveGridView(SilentGridView):
    """Draw overall progress, time left and a line for every running job; print failures above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def tick(self, state: GridState) -> None:
        """Redraw."""
        self._live.update(grid_picture(state))

    def finished(self, job: Job, state: GridState, summary: str, skipped: int) -> None:
        """Print a line if tasks were skipped."""
        if skipped:
            line = Text.assemble(("non-finite", "yellow"), f": {job.name}: {_skipped_note(skipped)}")
            self._console.print(line, soft_wrap=True)

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        """Print the reason."""
        word = ("crashed, will be retried", "yellow") if again else ("failed", "red")
        self._console.print(Text.assemble(word, f": {job.name}: {reason}"), soft_wrap=True)

    def lost(self, job: Job, state: GridState, reason: str, begun: bool) -> None:
        """Print the reason, and where the run resumes."""
        self._console.print(Text.assemble((_lost_note(begun), "yellow"), f": {job.name}: {reason}"), soft_wrap=True)


def grid_picture(state: GridState) -> Group:
    """Draw the progress of a grid for a terminal."""
    overall = Table.grid(padding=(0, 2))
    facts = [f"{state.done}/{state.total} runs", _time_left(state)]
    facts += [f"{len(state.failed)} failed"] if state.failed else []
    facts += [f"waiting for {len(state.busy)} of another process"] if state.busy else []
    overall.add_row(ProgressBar(total=state.total, completed=state.done, width=40), "  ".join(filter(None, facts)))
    jobs = Table.grid(padding=(0, 2))
    for name, running in state.running.items():
        bar = ProgressBar(total=running.steps, completed=running.step, width=20)
        step = f"step {running.step} of {running.steps}" if running.steps else "starting"
        jobs.add_row(Text(f"  {name}"), bar, step, f"on {running.node}" if running.node else "")
    return Group(overall, jobs)


def _time_left(state: GridState) -> str:
    seconds = state.seconds_left()
    return "" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"


def _lost_note(begun: bool) -> str:
    return f"lost, will {'resume from its last checkpoint' if begun else 'start again'}"


def _skipped_note(times: int) -> str:
    return f"tasks were skipped {times} times (loss or gradient not finite)" if times else ""
