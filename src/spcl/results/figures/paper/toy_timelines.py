"""Figures 9 to 11: stability of the toy experiment for several joining and ending times."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from spcl.results.figures.comparable import settings_key
from spcl.results.figures.curves import RunCurves
from spcl.results.figures.panels import legend_below, mark_task_changes, measure_axis, panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import BLUE, VERMILLION, WIDTH
from spcl.results.figures.two_tasks import two_task_runs
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.measures import MEASURES
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name

__all__ = ["FIGURE"]

METHODS = ("soro+dbt", "soro")
"""In order of preference."""

MOST_TIMELINES = 4


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the three measures of G and Ĝ, in a column for each timeline."""
    runs = complete_runs(records)
    chosen = [RunCurves(run) for run in _one_run_per_timeline(runs)]
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    panels = figure.subplots(3, len(chosen), sharex="col", sharey="row", squeeze=False)
    for column, curves in enumerate(chosen):
        for row, measure in enumerate(MEASURES):
            axes = panels[row, column]
            axes.plot(*curves.stability(measure, "before"), color=BLUE, linewidth=0.9, label="original G")
            axes.plot(*curves.stability(measure, "after"), color=VERMILLION, linewidth=1.6, label="adjusted Ĝ")
            measure_axis(axes, measure)
            axes.set_ylabel(MEASURES[measure])
            axes.label_outer()
            axes.set_xlim(left=0)
            mark_task_changes(axes, curves.timeline)
        (_, end), (join, last) = curves.timeline
        panel_title(panels[0, column], column, f"joins at {join},\nends at {end} and {last}")
        panels[2, column].set_xlabel("step")
    legend_below(figure, 2)
    run = chosen[0].run
    return figure, f"{run.benchmark}, {run.scenario}-incremental, {display_name(run.method)}, seed {run.seed}."


def _one_run_per_timeline(runs: Sequence[CompleteRun]) -> list[CompleteRun]:
    """Return runs of one method that differ only in their timeline."""
    by_method = group_by(two_task_runs(runs), lambda run: run.method)
    candidates = next((by_method[name] for name in METHODS if name in by_method), [])
    if not candidates:
        raise MissingRunsError("there is none by " + " or ".join(METHODS))
    groups = group_by(candidates, lambda run: settings_key(run, "config", "protocol_seed", "overlap", "gap"))
    largest = max(groups.values(), key=len)
    by_timeline = group_by(largest, lambda run: run.result.timeline)
    return [group[0] for group in by_timeline.values()][:MOST_TIMELINES]


FIGURE = FigureSpec(
    name="toy-timelines",
    number="Figures 9, 10 and 11",
    title="Toy experiment under different timelines",
    caption="Condition number, gradient conflicts and gradient magnitude similarity of the original gradient matrix G "
    "and the adjusted one Ĝ under different timelines: the second task joins at the dashed line, the first ends at "
    "the dotted one.",
    needs="runs of two tasks by soro or soro+dbt, with several timelines",
    grids=(GridCommand("toy-cifar10", "soro+dbt", configs="0-2", seeds="0", sweeps=("overlap=1,0.5",)),),
    draw=draw,
)
