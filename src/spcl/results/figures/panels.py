"""Titles, axes, legends and timeline bars shared by several figures."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from spcl.results.figures.style import COLOURS, WIDTH
from spcl.results.measures import Measure
from spcl.streams import Timeline

__all__ = [
    "GREY",
    "draw_timeline_bars",
    "legend_below",
    "log_scale",
    "mark_task_changes",
    "measure_axis",
    "panel_grid",
    "panel_title",
]

GREY = "0.5"


def panel_title(axes: Axes, number: int, title: str) -> None:
    """Set the title of a panel, with its letter.

    >>> axes = Figure().subplots()
    >>> panel_title(axes, 1, "Accuracy")
    >>> axes.get_title("left")
    '(b) Accuracy'
    """
    axes.set_title(f"({chr(ord('a') + number)}) {title}", loc="left")


def panel_grid(
    count: int, most_columns: int, row_height: float, extra_height: float = 0.0, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels in rows; ``options`` are those of Matplotlib's ``subplots``."""
    columns = min(most_columns, count)
    rows = -(-count // columns)
    size = (WIDTH if columns > 1 else 0.7 * WIDTH, rows * row_height + extra_height)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def measure_axis(axes: Axes, measure: Measure) -> None:
    """Set up the vertical axis for a measure of stability: logarithmic for κ, zero marked for the cosine."""
    if measure == "condition_number":
        log_scale(axes)
    elif measure == "cosine":
        axes.axhline(0.0, color=GREY, linewidth=0.7, zorder=1)


def log_scale(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def mark_task_changes(axes: Axes, timeline: Sequence[tuple[int, int]]) -> None:
    """Draw a dashed line where the second task joins, and a dotted one where the first ends."""
    axes.axvline(timeline[1][0], color=GREY, linestyle="--", linewidth=1.0)
    axes.axvline(timeline[0][1], color=GREY, linestyle=":", linewidth=1.0)


def legend_below(figure: Figure, columns: int, title: str | None = None) -> None:
    """Add one legend for all panels, each label once."""
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, title=title)


def draw_timeline_bars(axes: Axes, timeline: Timeline) -> None:
    """Draw a bar for the time of each task, and a hatched one for the memory, which starts when a task has ended."""
    for task, (first, last) in enumerate(timeline.spans):
        axes.barh(task, last + 1 - first, left=first, height=0.72, color=COLOURS[task % len(COLOURS)])
    memory = len(timeline.spans)
    if rest := timeline.steps - timeline.memory_start:
        hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": GREY, "hatch": "////"}
        axes.barh(memory, rest, left=timeline.memory_start, height=0.72, **hatched)
    axes.set_yticks(range(memory + 1), [*(f"task {task}" for task in range(1, memory + 1)), "memory"])
    axes.set_ylim(memory + 0.6, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
