"""The paper's figures of two tasks, of which the second joins while the first trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spcl.results.compare import MEASURES
from spcl.results.figures.curves import RunCurves, mean_curve, settings_key, setup_key
from spcl.results.figures.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    VERMILLION,
    WIDTH,
    GridCommand,
    MissingRunsError,
    figure,
    legend_below,
    mark_task_changes,
    measure_axis,
    new_figure,
    panel_title,
)
from spcl.results.names import display_name, format_count
from spcl.results.records import CompleteRun, RunRecord, complete_runs, group_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- two tasks


def two_task_runs(runs: Sequence[CompleteRun]) -> list[CompleteRun]:
    """Return the runs of two tasks of which the second joins while the first trains."""
    found = []
    for run in runs:
        timeline = run.result.timeline
        if len(timeline) == 2 and 0 < timeline[1][0] < timeline[0][1]:
            found.append(run)
    if not found:
        raise MissingRunsError(f"none of {len(runs)} complete runs has two tasks of which the second joins later")
    return found


def evaluated_over_time(runs: Sequence[CompleteRun]) -> list[CompleteRun]:
    """Return the runs that evaluate also between the ends of tasks."""
    return [run for run in runs if run.settings["evaluate_every"]]


# -- toy

WITHOUT_SPCL = "er"
WITH_SPCL = ("soro+dbt", "soro")
"""In order of preference."""


@figure(
    "toy",
    number="Figure 1",
    title="Toy experiment",
    caption="A toy experiment with two tasks: the first is trained alone until, at the dashed line, the second joins; "
    "at the dotted line the first ends.",
    needs="runs of two tasks by er and by soro or soro+dbt, evaluated along the way",
    grids=(GridCommand("toy-cifar10", "er,soro+dbt", seeds="0", assignments=("evaluate_every=10",)),),
)
def toy(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw κ, conflicts, magnitude similarity and accuracy over time, with and without SPCL."""
    runs = complete_runs(records)
    plain, stable = (RunCurves(run) for run in _pair(runs))
    figure = new_figure(WIDTH, 5.0)
    panels = figure.subplots(2, 2, sharex=True)
    for number, (axes, (measure, title)) in enumerate(zip(panels.flat, MEASURES.items(), strict=False)):
        axes.plot(*plain.stability(measure, "before"), color=BLUE, linewidth=0.9, label="without SPCL")
        axes.plot(*stable.stability(measure, "after"), color=VERMILLION, linewidth=1.4, label="with SPCL")
        measure_axis(axes, measure)
        panel_title(axes, number, title.capitalize())
    _draw_accuracies(panels[1, 1], plain, stable)
    for axes in panels.flat:
        mark_task_changes(axes, plain.timeline)
    for axes in panels[1]:
        axes.set_xlabel("step")
    legend_below(figure, 4)
    run = stable.run
    return figure, (
        f"{run.benchmark}, {run.scenario}-incremental, configuration {run.config}, seed {run.seed}; "
        f"without SPCL: {display_name(plain.run.method)}, with SPCL: {display_name(run.method)}."
    )


def _draw_accuracies(axes: Axes, plain: RunCurves, stable: RunCurves) -> None:
    for number, (dashes, marker) in enumerate((("-", "o"), ((0, (4, 1.5)), "s"))):
        marks: dict[str, Any] = {"linestyle": dashes, "marker": marker, "markersize": 2.5}
        for curves, colour in ((plain, BLUE), (stable, VERMILLION)):
            axes.plot(*curves.accuracy(curves.tasks[number]), color=colour, **marks)
        axes.plot([], [], color=GREY, label=f"task {number + 1}", **marks)
    axes.set_ylabel("accuracy (%)")
    panel_title(axes, 3, "Accuracy")


def _pair(runs: Sequence[CompleteRun]) -> tuple[CompleteRun, CompleteRun]:
    """Return two runs with the same setup, without and with SPCL."""
    evaluated = evaluated_over_time(two_task_runs(runs))
    if not evaluated:
        raise MissingRunsError("those of two tasks were evaluated only when a task ended")
    for group in group_by(evaluated, setup_key).values():
        plain = [run for run in group if run.method == WITHOUT_SPCL and not run.settings["method"]["alpha"]]
        stable = [run for name in WITH_SPCL for run in group if run.method == name]
        if plain and stable:
            return plain[0], stable[0]
    raise MissingRunsError(f"no configuration was run both by {WITHOUT_SPCL} and by {' or '.join(WITH_SPCL)}")


# -- ablation

CONDITIONS: dict[str, dict[str, Any]] = {
    "none": {"color": BLACK, "linestyle": (0, (1.2, 1.2)), "marker": "v"},
    "gradients": {"color": BLUE, "linestyle": (0, (5, 1.5)), "marker": "s"},
    "filters": {"color": GREEN, "linestyle": (0, (5, 1.5, 1.2, 1.5)), "marker": "^"},
    "both": {"color": VERMILLION, "linestyle": "-", "marker": "o"},
}


@figure(
    "ablation",
    number="Figure 3",
    title="Ablation",
    caption="Ablation study with two tasks, the second starting at the dashed line and the first ending at the dotted "
    "one: accuracy over time with orthogonal gradients (SORO), orthogonal filters (DBT), both, or none.",
    needs="runs of two tasks by er and by soro, each with α = 0 and with one other α, evaluated along the way",
    grids=(GridCommand("toy-cifar10", "er,soro", assignments=("evaluate_every=10",), sweeps=("method.alpha=0,1e-5",)),),
)
def ablation(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the accuracy of the two tasks over time, in a panel each, with a line for each condition."""
    runs = complete_runs(records)
    by_condition, alpha = _runs_by_condition(evaluated_over_time(two_task_runs(runs)))
    curves = {name: [RunCurves(run) for run in group] for name, group in by_condition.items()}
    first = curves["both"][0]
    figure = new_figure(WIDTH, 3.1)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for number, (axes, task) in enumerate(zip(panels, first.tasks, strict=True)):
        for name, line_style in CONDITIONS.items():
            steps, values = mean_curve([curve.accuracy(task) for curve in curves[name]])
            axes.plot(steps, values, label=name, markersize=3, markevery=max(1, len(steps) // 12), **line_style)
        mark_task_changes(axes, first.timeline)
        panel_title(axes, number, f"Task {number + 1}")
        axes.set_xlabel("step")
    panels[0].set_ylabel("accuracy (%)")
    legend_below(figure, 4, "orthogonal")
    run = first.run
    return figure, (
        f"{run.benchmark}, {run.scenario}-incremental, configuration {run.config}, α = {alpha:g}, "
        f"mean of {format_count(map(len, curves.values()), 'run')} a line."
    )


def condition(run: RunRecord) -> str | None:
    """Return the condition that a run belongs to, if any.

    >>> from pathlib import Path
    >>> condition(RunRecord(Path(), {"method": {"name": "er", "alpha": 0.001}}, None))
    'filters'
    """
    gradients, filters = run.method in ("soro", "soro+dbt"), _alpha(run) > 0
    if not gradients and run.method != "er":
        return None
    return {(0, 0): "none", (1, 0): "gradients", (0, 1): "filters", (1, 1): "both"}[gradients, filters]


def _runs_by_condition(runs: Sequence[CompleteRun]) -> tuple[dict[str, list[CompleteRun]], float]:
    """Return the runs by condition, of the first configuration that has all four for one α, and that α."""
    found: set[str] = set()
    for group in group_by(runs, lambda run: setup_key(run, "seed")).values():
        for alpha in sorted({_alpha(run) for run in group} - {0.0}):
            by_condition = group_by([run for run in group if _alpha(run) in (0.0, alpha)], condition)
            present = {name: by_condition[name] for name in CONDITIONS if name in by_condition}
            if len(present) == len(CONDITIONS):
                return present, alpha
        found |= {name for run in group if (name := condition(run)) is not None}
    seen = ", ".join(name for name in CONDITIONS if name in found) or "nothing"
    raise MissingRunsError(f"no configuration has all of {', '.join(CONDITIONS)} with one α (found {seen})")


def _alpha(run: RunRecord) -> float:
    return float(run.settings["method"]["alpha"])


# -- toy timelines

METHODS = ("soro+dbt", "soro")
"""In order of preference."""

MOST_TIMELINES = 4


@figure(
    "toy-timelines",
    number="Figures 9, 10 and 11",
    title="Toy experiment under different timelines",
    caption="Condition number, gradient conflicts and gradient magnitude similarity of the original gradient matrix G "
    "and the adjusted one Ĝ under different timelines: the second task joins at the dashed line, the first ends at "
    "the dotted one.",
    needs="runs of two tasks by soro or soro+dbt, with several timelines",
    grids=(GridCommand("toy-cifar10", "soro+dbt", configs="0-2", seeds="0", sweeps=("overlap=1,0.5",)),),
)
def toy_timelines(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the three measures of G and Ĝ, in a column for each timeline."""
    runs = complete_runs(records)
    chosen = [RunCurves(run) for run in _one_run_per_timeline(runs)]
    figure = new_figure(WIDTH, 5.4)
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
