"""What a person sees of a grid while it goes on: a live picture on a terminal, plain lines elsewhere."""

from datetime import timedelta
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spcl.grids.grid import GridState
from spcl.grids.plan import Job

__all__ = ["LiveGridView", "PlainGridView"]


def time_left(state: GridState) -> str:
    """The rest of a grid's time, for people."""
    seconds = state.seconds_left()
    return "" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"


def left_out_note(times: int) -> str:
    """How often a task was left out, for people."""
    return f"tasks were left out of steps {times} times (loss or gradient not finite)" if times else ""


class PlainGridView:
    """A line for every run that ends, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tick(self, state: GridState) -> None:
        """Nothing."""

    def finished(self, job: Job, state: GridState, accuracy: float, forgetting: float, left_out: int) -> None:
        """The run, its two numbers, whether tasks were left out, and how long the rest will take."""
        facts = [f"accuracy {accuracy:.2f} %", f"forgetting {forgetting:+.2f} %", left_out_note(left_out)]
        self._print(state, f"{job.name}: {', '.join(filter(None, [*facts, time_left(state)]))}")

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        """The run and the reason."""
        self._print(state, f"{job.name}: {'crashed, will be tried again' if again else 'failed'}: {reason}")

    def _print(self, state: GridState, line: str) -> None:
        width = len(str(state.total))
        self._console.print(
            f"{state.done:>{width}}/{state.total}  {line}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


class LiveGridView:
    """Overall progress, time left, a line for every job that runs; what went wrong stays above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def tick(self, state: GridState) -> None:
        """Draw again."""
        self._live.update(grid_picture(state))

    def finished(self, job: Job, state: GridState, accuracy: float, forgetting: float, left_out: int) -> None:
        """The picture shows it, and a line that stays if tasks were left out."""
        if left_out:
            line = Text.assemble(("not finite", "yellow"), f": {job.name}: {left_out_note(left_out)}")
            self._console.print(line, soft_wrap=True)

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        """A line that stays."""
        word = ("crashed, will be tried again", "yellow") if again else ("failed", "red")
        self._console.print(Text.assemble(word, f": {job.name}: {reason}"), soft_wrap=True)


def grid_picture(state: GridState) -> Group:
    """The state of a grid as a picture for the terminal."""
    overall = Table.grid(padding=(0, 2))
    facts = [f"{state.done}/{state.total} runs", time_left(state)]
    facts += [f"{len(state.failed)} failed"] if state.failed else []
    facts += [f"waiting for {len(state.busy)} of another process"] if state.busy else []
    overall.add_row(ProgressBar(total=state.total, completed=state.done, width=40), "  ".join(filter(None, facts)))
    jobs = Table.grid(padding=(0, 2))
    for name, running in state.running.items():
        bar = ProgressBar(total=running.steps, completed=running.step, width=20)
        step = f"step {running.step} of {running.steps}" if running.steps else "starting"
        jobs.add_row(Text(f"  {name}"), bar, step)
    return Group(overall, jobs)
