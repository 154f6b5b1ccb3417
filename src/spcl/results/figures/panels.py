"""Parts that panels of several figures share."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from spcl.results.figures.curves import Measure
from spcl.results.figures.style import COLOURS
from spcl.streams import Timeline

__all__ = ["GREY", "draw_bars", "legend_below", "letter", "logarithmic", "mark_changes", "measure_axis"]

GREY = "0.5"


def letter(axes: Axes, number: int, title: str) -> None:
    """Head a panel as papers do: (a), (b), ….

    >>> axes = Figure().subplots()
    >>> letter(axes, 1, "Accuracy")
    >>> axes.get_title("left")
    '(b) Accuracy'
    """
    axes.set_title(f"({chr(ord('a') + number)}) {title}", loc="left")


def measure_axis(axes: Axes, measure: Measure) -> None:
    """The vertical axis of a measure of stability: logarithmic for κ, zero marked for the cosine."""
    if measure == "condition_number":
        logarithmic(axes)
    elif measure == "cosine":
        axes.axhline(0.0, color=GREY, linewidth=0.7, zorder=1)


def logarithmic(axes: Axes) -> None:
    """A logarithmic vertical axis with plain numbers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def mark_changes(axes: Axes, timeline: Sequence[tuple[int, int]]) -> None:
    """A dashed line where the second task joins, a dotted one where the first ends."""
    axes.axvline(timeline[1][0], color=GREY, linestyle="--", linewidth=1.0)
    axes.axvline(timeline[0][1], color=GREY, linestyle=":", linewidth=1.0)


def legend_below(figure: Figure, columns: int, title: str | None = None) -> None:
    """One legend for all panels, each label once."""
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, title=title)


def draw_bars(axes: Axes, timeline: Timeline, names: Sequence[str]) -> None:
    """A bar for the time of each task, and a hatched one for the memory, which starts when a task has ended."""
    for place, (first, last) in enumerate(timeline.spans):
        axes.barh(place, last + 1 - first, left=first, height=0.72, color=COLOURS[place % len(COLOURS)])
    memory = len(timeline.spans)
    if rest := timeline.steps - timeline.memory_start:
        hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": GREY, "hatch": "////"}
        axes.barh(memory, rest, left=timeline.memory_start, height=0.72, **hatched)
    axes.set_yticks(range(memory + 1), [*names, "memory"])
    axes.set_ylim(memory + 0.6, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
