"""The toy experiment: what becomes of two tasks when the second one joins."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from spcl.results.figures.comparable import circumstances, identity
from spcl.results.figures.curves import MEASURES, Curves, grouped
from spcl.results.figures.drawing import FigureSpec, MissingRunsError
from spcl.results.figures.panels import GREY, legend_below, letter, mark_changes, measure_axis
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import BLUE, VERMILLION, WIDTH, display
from spcl.results.records import RunRecord

__all__ = ["TOY", "TOY_TIMELINES", "two_task_runs"]

PLAIN = "er"
STABLE = ("soro+dbt", "soro")
MOST_TIMELINES = 4


def draw_toy(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """κ, conflicts, magnitude similarity and accuracy over time, with and without SPCL."""
    plain, stable = (Curves(run) for run in _pair(runs))
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for number, (axes, (measure, title)) in enumerate(zip(panels.flat, MEASURES.items(), strict=False)):
        axes.plot(*plain.stability(measure, "before"), color=BLUE, linewidth=0.9, label="without SPCL")
        axes.plot(*stable.stability(measure, "after"), color=VERMILLION, linewidth=1.4, label="with SPCL")
        measure_axis(axes, measure)
        letter(axes, number, title.capitalize())
    accuracy = panels[1, 1]
    for number, (line, marker) in enumerate((("-", "o"), ((0, (4, 1.5)), "s"))):
        marks: dict[str, Any] = {"linestyle": line, "marker": marker, "markersize": 2.5}
        for curves, colour in ((plain, BLUE), (stable, VERMILLION)):
            accuracy.plot(*curves.accuracy(curves.tasks[number]), color=colour, **marks)
        accuracy.plot([], [], color=GREY, label=f"task {number + 1}", **marks)
    accuracy.set_ylabel("accuracy (%)")
    letter(accuracy, 3, "Accuracy")
    for axes in panels.flat:
        mark_changes(axes, plain.timeline)
    for axes in panels[1]:
        axes.set_xlabel("step")
    legend_below(figure, 4)
    run = stable.run
    return figure, (
        f"{run.benchmark}, {run.scenario}-incremental, configuration {run.config}, seed {run.seed}; "
        f"without SPCL: {display(plain.run.method)}, with SPCL: {display(run.method)}."
    )


def draw_toy_timelines(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """The three measures of G and Ĝ, for several joining and ending times."""
    cells = grouped(_stable_runs(runs), lambda run: identity(run, "config", "protocol_seed", "overlap", "gap"))
    cell: list[RunRecord] = max(cells.values(), key=len, default=[])
    by_timeline = grouped(cell, lambda run: run.timeline)
    chosen = [Curves(group[0]) for group in by_timeline.values()][:MOST_TIMELINES]
    if not chosen:
        raise MissingRunsError("there is none by " + " or ".join(STABLE))
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
            mark_changes(axes, curves.timeline)
        (_, end), (join, last) = curves.timeline
        letter(panels[0, column], column, f"joins at {join},\nends at {end} and {last}")
        panels[2, column].set_xlabel("step")
    legend_below(figure, 2)
    run = chosen[0].run
    return figure, f"{run.benchmark}, {run.scenario}-incremental, {display(run.method)}, seed {run.seed}."


def two_task_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs of two tasks of which the second joins while the first trains."""
    found = []
    for run in runs:
        timeline = run.timeline
        if len(timeline) == 2 and 0 < timeline[1][0] < timeline[0][1]:
            found.append(run)
    if not found:
        raise MissingRunsError(f"none of {len(runs)} complete runs has two tasks of which the second joins later")
    return found


def _stable_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """SPCL's, with DBT if there is a choice."""
    by_method = grouped(two_task_runs(runs), lambda run: run.method)
    return next((by_method[name] for name in STABLE if name in by_method), [])


def _pair(runs: Sequence[RunRecord]) -> tuple[RunRecord, RunRecord]:
    evaluated = [run for run in two_task_runs(runs) if run.settings["evaluate_every"]]
    if not evaluated:
        raise MissingRunsError("those of two tasks were evaluated only when a task ended")
    cells = grouped(evaluated, circumstances)
    for cell in cells.values():
        plain = [run for run in cell if run.method == PLAIN and not run.settings["method"]["alpha"]]
        stable = [run for name in STABLE for run in cell if run.method == name]
        if plain and stable:
            return plain[0], stable[0]
    raise MissingRunsError(f"no configuration was run both by {PLAIN} and by {' or '.join(STABLE)}")


TOY = FigureSpec(
    name="toy",
    number="Figure 1",
    title="Toy experiment",
    caption="A toy experiment with two tasks: the first is trained alone until, at the dashed line, the second joins; "
    "at the dotted line the first ends.",
    needs="runs of two tasks by er and by soro or soro+dbt, evaluated along the way",
    recipes=(Recipe("toy-cifar10", "er,soro+dbt", seeds="0", assignments=("evaluate_every=10",)),),
    draw=draw_toy,
)

TOY_TIMELINES = FigureSpec(
    name="toy-timelines",
    number="Figures 9, 10 and 11",
    title="Toy experiment under different timelines",
    caption="Condition number, gradient conflicts and gradient magnitude similarity of the original gradient matrix G "
    "and the adjusted one Ĝ under different timelines: the second task joins at the dashed line, the first ends at "
    "the dotted one.",
    needs="runs of two tasks by soro or soro+dbt, with several timelines",
    recipes=(Recipe("toy-cifar10", "soro+dbt", configs="0-2", seeds="0", sweeps=("overlap=1,0.5",)),),
    draw=draw_toy_timelines,
)
