"""Figure 1, the toy experiment: stability and accuracy of two tasks when the second one joins."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spcl.results.figures.comparable import setup_key
from spcl.results.figures.curves import RunCurves
from spcl.results.figures.panels import GREY, legend_below, mark_task_changes, measure_axis, panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import BLUE, VERMILLION, WIDTH
from spcl.results.figures.two_tasks import evaluated_over_time, two_task_runs
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.measures import MEASURES
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name

__all__ = ["FIGURE"]

WITHOUT_SPCL = "er"
WITH_SPCL = ("soro+dbt", "soro")
"""In order of preference."""


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw κ, conflicts, magnitude similarity and accuracy over time, with and without SPCL."""
    runs = complete_runs(records)
    plain, stable = (RunCurves(run) for run in _pair(runs))
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
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


FIGURE = FigureSpec(
    name="toy",
    number="Figure 1",
    title="Toy experiment",
    caption="A toy experiment with two tasks: the first is trained alone until, at the dashed line, the second joins; "
    "at the dotted line the first ends.",
    needs="runs of two tasks by er and by soro or soro+dbt, evaluated along the way",
    grids=(GridCommand("toy-cifar10", "er,soro+dbt", seeds="0", assignments=("evaluate_every=10",)),),
    draw=draw,
)
