"""Timelines (Section 5.1): when each task trains, and when memory starts."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from spcl.data.protocol import Protocol
from spcl.results.figures.comparable import setup_key
from spcl.results.figures.drawing import Drawing
from spcl.results.figures.panels import draw_timeline_bars, panel_grid, panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import figure_style
from spcl.results.formatting import format_ranges
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.records import RunRecord, complete_runs
from spcl.streams import Timeline

__all__ = ["FIGURE", "draw_protocol"]

MOST_TIMELINES = 9


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the timelines of the largest set of runs that differ only in method, configuration and seed."""
    runs = complete_runs(records)
    known = [run for run in runs if run.result.timeline]
    if not known:
        raise MissingRunsError(f"{len(runs)} complete runs hold no timeline" if runs else "there is none")
    comparable = max(group_by(known, lambda run: setup_key(run, "seed", "config")).values(), key=len)
    timelines = {
        f"configuration {format_ranges(sorted({run.config for run in group}))}": Timeline(spans)
        for spans, group in group_by(comparable, lambda run: run.result.timeline).items()
    }
    return _draw_timelines(timelines), f"{comparable[0].benchmark}."


def draw_protocol(protocol: Protocol) -> Drawing:
    """Draw the timelines of a protocol, whether or not they have been run."""
    timelines = {f"configuration {index}": protocol.configuration(index).timeline for index in range(len(protocol))}
    with figure_style():
        return Drawing(FIGURE, _draw_timelines(timelines), f"{FIGURE.number}. {FIGURE.caption} {protocol.benchmark}.")


def _draw_timelines(timelines: Mapping[str, Timeline]) -> Figure:
    """Draw a panel for each of the first nine timelines."""
    shown = list(timelines.items())[:MOST_TIMELINES]
    bars = max(len(timeline.spans) for _, timeline in shown) + 1
    figure, panels = panel_grid(len(shown), most_columns=3, row_height=0.7 + 0.17 * bars, sharex=True, sharey=True)
    for number, (axes, (title, timeline)) in enumerate(zip(panels, shown, strict=True)):
        draw_timeline_bars(axes, timeline)
        panel_title(axes, number, title)
    panels[0].set_xlim(0, max(timeline.steps for _, timeline in shown))
    figure.supxlabel("step", fontsize=8.5)
    return figure


FIGURE = FigureSpec(
    name="timeline",
    number="Section 5.1",
    title="Timelines",
    caption="Which task trains when; the memory (hatched) starts when the first task has ended.",
    needs="complete runs, or a protocol file",
    grids=(GridCommand("ps-glyphs", "soro", configs="0-8", seeds="0"),),
    draw=draw,
)
