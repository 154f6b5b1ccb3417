"""Figure 3, the ablation: orthogonal gradients, orthogonal filters, both, or neither."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from spcl.results.figures.comparable import setup_key
from spcl.results.figures.curves import RunCurves, mean_curve
from spcl.results.figures.panels import legend_below, mark_task_changes, panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import BLACK, BLUE, GREEN, VERMILLION, WIDTH
from spcl.results.figures.two_tasks import evaluated_over_time, two_task_runs
from spcl.results.formatting import format_count
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs

__all__ = ["FIGURE", "condition"]

CONDITIONS: dict[str, dict[str, Any]] = {
    "none": {"color": BLACK, "linestyle": (0, (1.2, 1.2)), "marker": "v"},
    "gradients": {"color": BLUE, "linestyle": (0, (5, 1.5)), "marker": "s"},
    "filters": {"color": GREEN, "linestyle": (0, (5, 1.5, 1.2, 1.5)), "marker": "^"},
    "both": {"color": VERMILLION, "linestyle": "-", "marker": "o"},
}


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the accuracy of the two tasks over time, in a panel each, with a line for each condition."""
    runs = complete_runs(records)
    by_condition, alpha = _runs_by_condition(evaluated_over_time(two_task_runs(runs)))
    curves = {name: [RunCurves(run) for run in group] for name, group in by_condition.items()}
    first = curves["both"][0]
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
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


FIGURE = FigureSpec(
    name="ablation",
    number="Figure 3",
    title="Ablation",
    caption="Ablation study with two tasks, the second starting at the dashed line and the first ending at the dotted "
    "one: accuracy over time with orthogonal gradients (SORO), orthogonal filters (DBT), both, or none.",
    needs="runs of two tasks by er and by soro, each with α = 0 and with one other α, evaluated along the way",
    grids=(GridCommand("toy-cifar10", "er,soro", assignments=("evaluate_every=10",), sweeps=("method.alpha=0,1e-5",)),),
    draw=draw,
)
