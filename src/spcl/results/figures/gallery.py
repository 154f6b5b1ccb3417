"""Figures of our own: a comparison of runs, timelines, and how much settings matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spcl.data import Protocol
from spcl.errors import SpclError
from spcl.methods import make_method
from spcl.results.figures.curves import (
    RunCurves,
    SweepLine,
    block_medians,
    draw_points,
    runs_note,
    setup_key,
    sweep_lines,
)
from spcl.results.figures.drawing import (
    WIDTH,
    Drawing,
    GridCommand,
    MissingRunsError,
    check_format,
    draw_timeline_bars,
    figure,
    figure_style,
    legend_below,
    measure_axis,
    new_figure,
    numbered_line_styles,
    panel_grid,
    panel_title,
    write_figure,
)
from spcl.results.names import display_name, format_ranges
from spcl.results.records import CompleteRun, RunRecord, complete_runs, group_by
from spcl.streams import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- comparison of single runs


POINTS = 80


def comparison_figure(runs: Sequence[RunRecord]) -> Figure:
    """Draw complete runs: accuracy of the seen tasks whenever one ends, final accuracy of every task, κ after."""
    complete = complete_runs(runs)
    if not complete:
        raise SpclError(f"none of {len(runs)} runs is complete; finish the runs to compare them")
    from matplotlib.ticker import MaxNLocator

    with figure_style():
        drawn = new_figure(WIDTH, 5.2)
        panels = drawn.subplot_mosaic([["ends", "kappa"], ["tasks", "tasks"]])
        for number, (run, line_style) in enumerate(zip(complete, numbered_line_styles(len(complete)), strict=True), 1):
            curves = RunCurves(run)
            ends = curves.accuracy_at_ends()
            label = f"{number}: {display_name(run.label)}"
            panels["ends"].plot(np.arange(1, len(ends) + 1), ends, label=label, **line_style.marked_line())
            kappa = block_medians(curves.stability("condition_number", "after"), POINTS)
            panels["kappa"].plot(*kappa, **line_style.line())
        _draw_tasks(panels["tasks"], complete)
        panel_title(panels["ends"], 0, "Accuracy of seen tasks when one ends")
        panel_title(panels["kappa"], 1, "Condition number after adjustment")
        panel_title(panels["tasks"], 2, "Accuracy of every task at the end")
        panels["ends"].set(xlabel="tasks ended", ylabel="accuracy (%)")
        panels["ends"].xaxis.set_major_locator(MaxNLocator(integer=True))
        panels["kappa"].set_xlabel("step")
        measure_axis(panels["kappa"], "condition_number")
        legend_below(drawn, 3)
    return drawn


def _draw_tasks(axes: Axes, runs: Sequence[CompleteRun]) -> None:
    """Draw for every task a group of bars, one for each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.result.tasks))
    width = 0.8 / len(runs)
    for index, (run, line_style) in enumerate(zip(runs, numbered_line_styles(len(runs)), strict=True)):
        shift = (index - (len(runs) - 1) / 2) * width
        tasks = run.result.tasks
        heights = [tasks[name].final if name in tasks else 0.0 for name in names]
        axes.bar(np.arange(len(names)) + shift, heights, width=0.92 * width, color=line_style.colour)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("accuracy (%)")


def save_comparison(runs: Sequence[RunRecord], path: Path) -> None:
    """Draw complete runs into a file."""
    write_figure(comparison_figure(runs), path)


def comparison_path(out: Path) -> Path:
    """Return the file to draw a comparison into: ``compare.png`` in a folder, PNG where there is no suffix.

    >>> print(comparison_path(Path("runs")), comparison_path(Path("runs.svg")))
    runs.png runs.svg
    """
    if out.is_dir():
        return out / "compare.png"
    if not out.suffix:
        return out.with_name(f"{out.name}.png")
    check_format(out)
    return out


# -- timelines

MOST_TIMELINES = 9


@figure(
    "timeline",
    number="Section 5.1",
    title="Timelines",
    caption="Which task trains when; the memory (hatched) starts when the first task has ended.",
    needs="complete runs, or a protocol file",
    grids=(GridCommand("ps-glyphs", "soro", configs="0-8", seeds="0"),),
)
def timelines(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the timelines of the largest set of runs that differ only in method, configuration and seed."""
    runs = complete_runs(records)
    known = [run for run in runs if run.result.timeline]
    if not known:
        raise MissingRunsError(f"{len(runs)} complete runs hold no timeline" if runs else "there is none")
    comparable = max(group_by(known, lambda run: setup_key(run, "seed", "config")).values(), key=len)
    found = {
        f"configuration {format_ranges(sorted({run.config for run in group}))}": Timeline(spans)
        for spans, group in group_by(comparable, lambda run: run.result.timeline).items()
    }
    return _draw_timelines(found), f"{comparable[0].benchmark}."


def draw_protocol(protocol: Protocol) -> Drawing:
    """Draw the timelines of a protocol, whether or not they have been run."""
    configurations = {
        f"configuration {index}": protocol.configuration(index).timeline for index in range(len(protocol))
    }
    with figure_style():
        caption = f"{timelines.number}. {timelines.caption} {protocol.benchmark}."
        return Drawing(timelines, _draw_timelines(configurations), caption)


def _draw_timelines(timelines: Mapping[str, Timeline]) -> Figure:
    """Draw a panel for each of the first nine timelines."""
    shown = list(timelines.items())[:MOST_TIMELINES]
    bars = max(len(timeline.spans) for _, timeline in shown) + 1
    drawn, panels = panel_grid(len(shown), most_columns=3, row_height=0.7 + 0.17 * bars, sharex=True, sharey=True)
    for number, (axes, (title, timeline)) in enumerate(zip(panels, shown, strict=True)):
        draw_timeline_bars(axes, timeline)
        panel_title(axes, number, title)
    panels[0].set_xlim(0, max(timeline.steps for _, timeline in shown))
    drawn.supxlabel("step", fontsize=8.5)
    return drawn


# -- how much settings matter

Lines = Mapping[str, tuple[float, SweepLine]]
"""By label, the default of a setting and the runs over its values."""


SWEEPS = {
    "spcl": ("method.kappa=1,2,6,20", "method.logit_weight=0.02,0.06,0.2,0.6,2"),
    "soro": ("method.sigma=10,30,100,300,1000", "method.lambda_=10,30,100,300,1000"),
    "der++": ("method.logit_weight=0.01,0.03,0.1,0.3,1", "method.label_weight=0.05,0.15,0.5,1.5,5"),
}


@figure(
    "sensitivity",
    number="Beyond Figure 7",
    title="How much settings matter",
    caption="Final accuracy against the settings of each method, as multiples of their defaults.",
    needs="runs of methods that differ only in one of their settings",
    grids=tuple(
        GridCommand("ps-emnist", method, scenarios="task,class", configs="0,4,8", sweeps=(sweep,))
        for method, sweeps in SWEEPS.items()
        for sweep in sweeps
    ),
)
def sensitivity(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw accuracy against every swept setting of every method, as a multiple of its default."""
    panels = {scenario: lines for scenario, runs in _scenarios(records).items() if (lines := _lines(runs))}
    if not panels:
        raise MissingRunsError("no runs of a method differ in just one of its settings whose default is above 0")
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    styles = dict(zip(labels, numbered_line_styles(len(labels)), strict=True))
    drawn = new_figure(WIDTH, 3.2)
    for number, (axes, (scenario, lines)) in enumerate(
        zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True)
    ):
        for label, (default, line) in lines.items():
            points = {value / default: point for value, point in line.points().items() if value > 0.0}
            draw_points(axes, points, label=label, **styles[label].marked_line())
        axes.axvline(1.0, color="0.8", linewidth=0.8, zorder=0)
        axes.set(xscale="log", xlabel="times the default", ylabel="accuracy (%)")
        panel_title(axes, number, f"{scenario}-incremental")
    drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    shown = [run for lines in panels.values() for _, line in lines.values() for run in line.records]
    return drawn, f"{', '.join(sorted({run.benchmark for run in shown}))}; {runs_note(shown)}"


def _scenarios(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    return group_by(sorted(records, key=lambda run: run.scenario, reverse=True), lambda run: run.scenario)


def _lines(records: Sequence[RunRecord]) -> Lines:
    """Return the largest sweep of every setting of every method, if its default is above 0."""
    return {
        f"{display_name(method)}, {name.rstrip('_')}": (default, found[0])
        for method, runs in group_by(records, lambda run: run.method).items()
        for name, default in _defaults(method).items()
        if (found := sweep_lines(runs, f"method.{name}"))
    }


def _defaults(method: str) -> dict[str, float]:
    """Return the numbers above 0 among the default settings of a method; none for one that is not known here."""
    try:
        settings = make_method(method).settings.model_dump()
    except SpclError:
        return {}
    return {name: value for name, value in settings.items() if type(value) in (int, float) and value > 0.0}
