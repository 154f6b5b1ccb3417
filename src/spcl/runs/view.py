"""Views of a run: a live picture for terminals, plain lines for logs, drawings of timelines."""

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from spcl.learner import StepReport
from spcl.runs.build import Problem
from spcl.runs.records import METRICS, SOURCE_MEASURES, RunResult
from spcl.runs.settings import RunSettings
from spcl.streams import Timeline
from spcl.tasks import TaskDescription

REFRESH_SECONDS = 0.25
DRAWING_SHARE = 0.005  # at most this part of the time is spent on drawing
PLAIN_SECONDS = 5.0
MOST_LISTED = 8
"""The most sources whose values are listed one by one."""


class View(Protocol):
    """Receive the progress events of a run."""

    def begin(self, settings: RunSettings, problem: Problem, done: int) -> None:
        """Open the view of a run that has made ``done`` steps."""
        ...

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        """Show a step; accuracies are the latest known, in per cent."""
        ...

    def end(self, result: RunResult) -> None:
        """Show the result of a complete run."""
        ...

    def close(self) -> None:
        """Close the view, whether the run is complete or not."""
        ...


class SilentView:
    """A view that shows nothing."""

    def begin(self, settings: RunSettings, problem: Problem, done: int) -> None:
        """Do nothing."""

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        """Do nothing."""

    def end(self, result: RunResult) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def title(settings: RunSettings) -> str:
    """Describe a run in one line."""
    return (
        f"{settings.method['name']} on {settings.benchmark}, {settings.scenario}-incremental, {settings.paradigm}, "
        f"configuration {settings.config}, seed {settings.seed}"
    )


def _scores(scores: Mapping[str, float], tasks: Mapping[str, TaskDescription]) -> str:
    """List scores in per cent, each with its metric where it is not accuracy; of many only their mean and the worst.

    >>> tasks = {"a": TaskDescription("a", classes=2), "b": TaskDescription("b", "regression", 1)}
    >>> _scores({"a": 90.0, "b": 75.0}, tasks)
    'a 90.0 %, b 75.0 % R²'
    >>> _scores({f"person-{number}": 50.0 + number for number in range(21)}, {})
    'mean 60.0 % of 21, worst 50.0 % (person-0)'
    """
    if len(scores) > MOST_LISTED:
        worst = min(scores, key=lambda name: scores[name])
        return f"mean {fmean(scores.values()):.1f} % of {len(scores)}, worst {scores[worst]:.1f} % ({worst})"
    metrics = {name: "" if task.kind == "classification" else f" {METRICS[task.kind]}" for name, task in tasks.items()}
    return ", ".join(f"{name} {value:.1f} %{metrics.get(name, '')}" for name, value in scores.items())


def _losses(losses: Mapping[str, float]) -> str:
    """List losses; of many only their mean and the highest.

    >>> _losses({"a": 0.5, "b": 1.25})
    'a 0.50, b 1.25'
    """
    if len(losses) > MOST_LISTED:
        highest = max(losses, key=lambda name: losses[name])
        return f"mean {fmean(losses.values()):.2f} of {len(losses)}, highest {losses[highest]:.2f} ({highest})"
    return ", ".join(f"{name} {value:.2f}" for name, value in losses.items())


def _nearest(timeline: Timeline, step: int) -> list[int]:
    """Return the tasks that run at this step and those whose spans are the nearest, at most :data:`MOST_LISTED`.

    >>> _nearest(Timeline(tuple((10 * task, 10 * task + 14) for task in range(40))), 203)
    [16, 17, 18, 19, 20, 21, 22, 23]
    """
    distances = [max(first - step, step - last, 0) for first, last in timeline.spans]
    return sorted(sorted(range(len(distances)), key=lambda task: (distances[task], task))[:MOST_LISTED])


def _condition(report: StepReport) -> str:
    if report.before is None:
        return "–"
    after = "–" if report.after is None else f"{report.after.condition_number:.3g}"
    return f"{report.before.condition_number:.3g} → {after}"


class PlainView(SilentView):
    """Print a line every few seconds and for every evaluation, for logs and pipes."""

    has_begun = False
    """Whether there was something to train; a complete run is not repeated."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: dict[str, float] = {}
        self._last = 0.0
        self._total = 0
        self._tasks: Mapping[str, TaskDescription] = {}

    def begin(self, settings: RunSettings, problem: Problem, done: int) -> None:
        """Print the title and the number of steps."""
        self.has_begun = True
        self._total, self._tasks = len(problem.stream), problem.asked
        self._console.print(f"{title(settings)}: {self._total} steps, {done} done", highlight=False, soft_wrap=True)

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        """Print a line if something was evaluated or a few seconds have passed."""
        new = {task: value for task, value in accuracies.items() if self._seen.get(task) != value}
        now = time.monotonic()
        if not new and now - self._last < PLAIN_SECONDS:
            return
        self._seen, self._last = dict(accuracies), now
        shown = accuracies if new and len(accuracies) > MOST_LISTED else new
        line = f"step {report.step + 1}/{self._total}  κ {_condition(report)}  {_scores(shown, self._tasks)}"
        self._console.print(line.rstrip(), highlight=False, soft_wrap=True)

    def end(self, result: RunResult) -> None:
        """Print accuracy, forgetting and training time."""
        self._console.print(
            f"{result.scenario}-incremental: {result.summary} (F below 0: forgotten), "
            f"{result.seconds['training']:.1f} s of training",
            highlight=False,
            soft_wrap=True,
        )


class LiveView:
    """Draw progress, timeline, accuracies, κ before and after weighting, and speed on a terminal."""

    has_begun = False
    """Whether there was something to train; a complete run is not repeated."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._draw_after = 0.0
        self._begun = 0.0
        self._done_before = 0

    def begin(self, settings: RunSettings, problem: Problem, done: int) -> None:
        """Start drawing."""
        self.has_begun = True
        self._settings, self._problem = settings, problem
        self._bar = self._progress.add_task("training", total=len(problem.stream), completed=done)
        self._begun, self._done_before = time.monotonic(), done
        self._live.start()

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        """Redraw a few times a second, or less often where drawing is slow."""
        now = time.monotonic()
        if now < self._draw_after:
            return
        self._progress.update(self._bar, completed=report.step + 1)
        rate = (report.step + 1 - self._done_before) / max(now - self._begun, 1e-9)
        self._live.update(self._picture(step, report, accuracies, rate), refresh=True)
        drawn = time.monotonic()
        self._draw_after = drawn + max(REFRESH_SECONDS, (drawn - now) / DRAWING_SHARE)

    def _picture(self, step: int, report: StepReport, accuracies: Mapping[str, float], rate: float) -> Group:
        width = max(20, min(80, self._console.width - 12))
        spans = self._problem.configuration.timeline
        shown = _nearest(spans, step)
        timeline = draw_timeline(spans, width, names=self._problem.stream.names, now=step + 1, shown=shown)
        facts = Table.grid(padding=(0, 3))
        if (left := len(spans.spans) - len(shown)) > 0:
            facts.add_row("not shown", f"{left} more")
        facts.add_row("κ before → after", _condition(report))
        facts.add_row("losses", _losses(report.losses))
        facts.add_row("accuracy", _scores(accuracies, self._problem.asked) or "–")
        facts.add_row("speed", f"{rate:.1f} steps/s, memory {report.memory_bytes / 1e6:.2f} MB")
        return Group(Text(title(self._settings), style="bold"), self._progress, timeline, facts)

    def end(self, result: RunResult) -> None:
        """Replace the picture by a table of the result."""
        self._live.stop()
        table = Table(title=title(self._settings), title_justify="left")
        noun = result.measure
        what = "source" if result.task_of else "task"
        for heading in (what, f"{noun} when it ended", f"{noun} at the end", "change"):
            table.add_column(heading, justify="left" if heading == what else "right")
        for name, task in result.tasks.items():
            change = task.final - task.at_end
            shown = name if task.metric == "accuracy" else f"{name} ({task.metric})"
            table.add_row(shown, f"{task.at_end:.2f} %", f"{task.final:.2f} %", f"{change:+.2f}")
        table.add_section()
        for name, task in result.by_task.items():
            change = task.final - task.at_end
            table.add_row(f"mean of {name}", f"{task.at_end:.2f} %", f"{task.final:.2f} %", f"{change:+.2f}")
        table.add_row(
            "mean", f"{result.at_end:.2f} %", f"{result.accuracy:.2f} %", f"{result.forgetting:+.2f}", style="bold"
        )
        for name, value in result.of_sources.items():
            if name != "at_end":
                table.add_row(SOURCE_MEASURES[name].title, "", f"{value:.2f} %", "")
        self._console.print(table)

    def close(self) -> None:
        """Stop drawing and restore the terminal."""
        self._live.stop()


# -- timelines


COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def draw_timeline(
    timeline: Timeline,
    width: int = 60,
    *,
    names: Sequence[str] | None = None,
    now: int | None = None,
    shown: Sequence[int] | None = None,
) -> Text:
    """Draw a bar for each task and one for memory, which starts when the first task has ended.

    Args:
        timeline: The timeline to draw.
        width: Width of the bars in characters, without names.
        names: The tasks' names; by default their numbers.
        now: The current step; later steps are drawn lighter.
        shown: The tasks that are drawn; by default all.

    >>> print(draw_timeline(Timeline(((0, 3), (2, 7))), 16, names=["camera", "lidar"], now=5))
    camera ████████
    lidar      ██████░░░░░░
    memory         ██░░░░░░
           0              7
    """
    tasks, steps = range(len(timeline.spans)) if shown is None else shown, timeline.steps
    titles = [*(names[task] if names else str(task) for task in tasks), "memory"]
    spans = [*(timeline.spans[task] for task in tasks), (timeline.memory_start, steps - 1)]
    styles = [*(COLOURS[task % len(COLOURS)] for task in tasks), "white"]
    margin = max(map(len, titles)) + 1
    drawing = Text()
    for title, span, style in zip(titles, spans, styles, strict=True):
        drawing.append(f"{title:{margin}}").append(_bar(span, steps, width, now).rstrip() + "\n", style)
    return drawing.append(" " * margin + f"0{steps - 1:>{width - 1}}", "dim")


def _bar(span: tuple[int, int], steps: int, width: int, now: int | None) -> str:
    first, last = span
    if last < first:
        return ""
    begin, end = first * width // steps, -(-(last + 1) * width // steps)
    past = end if now is None else min(max(now * width // steps, begin), end)
    return " " * begin + "█" * (past - begin) + "░" * (end - past)
