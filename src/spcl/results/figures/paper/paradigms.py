"""Figure 6: multi-task, serial continual and parallel continual learning."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spcl.results.figures.comparable import setup_key
from spcl.results.figures.panels import draw_timeline_bars, panel_title
from spcl.results.figures.spec import FigureSpec
from spcl.results.figures.style import WIDTH, line_styles
from spcl.results.figures.sweeps import draw_points, mean_accuracy, runs_note
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name, method_order
from spcl.streams import Timeline

__all__ = ["FIGURE"]

NAMES = {"joint": "Multi-task (MTL)", "serial": "Serial (SCL)", "parallel": "Parallel (PCL)"}
EXAMPLE = ((0, 39), (14, 53), (34, 73), (46, 85))
"""The timeline that is drawn where there are no runs."""


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the three timelines and, where one method was run under all three, its accuracies."""
    compared_records = _runs_of_all_paradigms(records)
    compared = complete_runs(compared_records)
    figure = Figure(figsize=(WIDTH, 4.3 if compared else 1.9), layout="constrained")
    ratios = (1, 1.4) if compared else None
    rows = figure.subfigures(2 if compared else 1, 1, squeeze=False, height_ratios=ratios)[:, 0]
    panels = rows[0].subplots(1, len(NAMES), sharex=True, sharey=True)
    for number, (axes, (paradigm, title)) in enumerate(zip(panels, NAMES.items(), strict=True)):
        draw_timeline_bars(axes, _timeline(paradigm, compared))
        panel_title(axes, number, title)
        axes.set_xlabel("step" if compared else "time")
    panels[0].set_xlim(0, _timeline("serial", compared).steps)
    if not compared:
        panels[0].set_xticks([])
        return figure, ""
    _draw_accuracies(rows[1].subplots(), compared)
    run = compared[0]
    return figure, (
        f"Timelines of configuration {_parallel_run(compared).config}; {run.benchmark}, {run.scenario}-incremental, "
        f"{runs_note(compared_records)}"
    )


def _runs_of_all_paradigms(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return runs that differ only in paradigm and method, if complete ones of all paradigms are among them."""
    groups = group_by(records, lambda run: setup_key(run, "seed", "config", "paradigm")).values()
    return next((group for group in groups if {run.paradigm for run in complete_runs(group)} >= NAMES.keys()), [])


def _parallel_run(runs: Sequence[CompleteRun]) -> CompleteRun:
    return next(run for run in runs if run.paradigm == "parallel")


def _timeline(paradigm: str, runs: Sequence[CompleteRun]) -> Timeline:
    parallel = Timeline((_parallel_run(runs).result.timeline if runs else ()) or EXAMPLE)
    return {
        "joint": Timeline.joint(parallel.durations),
        "serial": Timeline.serial(parallel.durations),
        "parallel": parallel,
    }[paradigm]


def _draw_accuracies(axes: Axes, runs: Sequence[CompleteRun]) -> None:
    methods = group_by(sorted(runs, key=lambda run: method_order(run.recipe)), lambda run: run.recipe)
    styles = line_styles(methods)
    for offset, (method, group) in zip(np.linspace(-0.25, 0.25, len(methods) + 2)[1:-1], methods.items(), strict=True):
        by_paradigm = group_by(group, lambda run: run.paradigm)
        positions = {tick + offset: name for tick, name in enumerate(NAMES) if name in by_paradigm}
        points = {position: mean_accuracy(by_paradigm[name]) for position, name in positions.items()}
        draw_points(axes, points, label=display_name(method), **styles[method].marked_line() | {"linestyle": "none"})
    axes.set_xticks(range(len(NAMES)), list(NAMES.values()))
    axes.set_xlim(-0.5, len(NAMES) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("accuracy (%)")
    panel_title(axes, len(NAMES), "Accuracy at the end")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


FIGURE = FigureSpec(
    name="paradigms",
    number="Figure 6",
    title="MTL, SCL and PCL",
    caption="Multi-task learning trains all tasks at once, serial continual learning one after another, parallel "
    "continual learning each from when it arises; the memory (hatched) starts when the first task has ended.",
    needs="nothing; accuracies are added where one benchmark was run under all three paradigms",
    grids=(GridCommand("ps-glyphs", "er,soro", sweeps=("paradigm=parallel,joint,serial",)),),
    draw=draw,
)
