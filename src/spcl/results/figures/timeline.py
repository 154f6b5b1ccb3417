"""Timelines: which task trains when, and where memory starts."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from spcl.data.protocol import Protocol
from spcl.results.figures.comparable import circumstances
from spcl.results.figures.curves import grouped, ranges
from spcl.results.figures.drawing import Drawing, FigureSpec, MissingRunsError
from spcl.results.figures.panels import draw_bars, letter
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import WIDTH, style
from spcl.results.records import RunRecord
from spcl.streams import Timeline

__all__ = ["TIMELINE", "draw_protocol"]

MOST = 9


def draw_timeline(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """The timelines, each once, of the largest set of runs that differ only in method, configuration and seed."""
    known = [run for run in runs if run.timeline]
    if not known:
        raise MissingRunsError(f"{len(runs)} complete runs hold no timeline" if runs else "there is none")
    alike = max(grouped(known, lambda run: circumstances(run, "seed", "config")).values(), key=len)
    by_timeline = grouped(alike, lambda run: run.timeline)
    timelines = {
        f"configuration {ranges(sorted({run.config for run in group}))}": Timeline(spans)
        for spans, group in by_timeline.items()
    }
    return _draw_panels(timelines), f"{alike[0].benchmark}."


def _draw_panels(timelines: Mapping[str, Timeline]) -> Figure:
    """A panel for each timeline; of more than nine, the first nine."""
    shown = list(timelines.items())[:MOST]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    tasks = max(len(timeline.spans) for _, timeline in shown)
    figure = Figure(
        figsize=(WIDTH if columns > 1 else 0.7 * WIDTH, rows * (0.7 + 0.17 * (tasks + 1))), layout="constrained"
    )
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for number, (axes, (title, timeline)) in enumerate(zip(panels.flat, shown, strict=False)):
        draw_bars(axes, timeline, [f"task {task}" for task in range(1, len(timeline.spans) + 1)])
        letter(axes, number, title)
    for axes in panels.flat[len(shown) :]:
        axes.remove()
    panels[0, 0].set_xlim(0, max(timeline.steps for _, timeline in shown))
    figure.supxlabel("step", fontsize=8.5)
    return figure


TIMELINE = FigureSpec(
    name="timeline",
    number="Section 5.1",
    title="Timelines",
    caption="Which task trains when; the memory (hatched) starts when the first task has ended.",
    needs="complete runs, or a protocol file (--protocol)",
    recipes=(Recipe("ps-glyphs", "soro", configs="0-8", seeds="0"),),
    draw=draw_timeline,
)


def draw_protocol(protocol: Protocol) -> Drawing:
    """The figure of a protocol's timelines, whether or not they have been run."""
    timelines = {f"configuration {index}": protocol.configuration(index).timeline for index in range(len(protocol))}
    with style():
        return Drawing(
            TIMELINE, _draw_panels(timelines), f"{TIMELINE.number}. {TIMELINE.caption} {protocol.benchmark}."
        )
