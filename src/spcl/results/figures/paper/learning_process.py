"""Figure 2, the learning process: average accuracy of the seen tasks whenever one ends."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spcl.results.figures.comparable import comparable_runs, not_shown_note
from spcl.results.figures.curves import Array, RunCurves
from spcl.results.figures.panels import legend_below, panel_grid, panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import line_styles
from spcl.results.formatting import format_count
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name

__all__ = ["FIGURE"]


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw a panel for each benchmark and scenario, with a line for each method."""
    runs = complete_runs(records)
    usable = [run for run in runs if run.settings["evaluate"] == "seen" and len(run.result.tasks) > 1]
    if not usable:
        raise MissingRunsError(f"none of {len(runs)} complete runs evaluated all tasks seen when one ended")
    by_panel = group_by(usable, lambda run: (run.benchmark, run.scenario))
    shown = {key: comparable_runs(group, "seed", "config") for key, group in by_panel.items()}
    figure, panels = panel_grid(len(shown), most_columns=2, row_height=2.7, extra_height=0.7)
    styles = line_styles(run.recipe for run in usable)
    for number, (axes, ((benchmark, scenario), methods)) in enumerate(zip(panels, shown.items(), strict=True)):
        for method, group in methods.items():
            means = mean_accuracy_at_ends(group)
            line_style = styles[method].marked_line()
            axes.plot(np.arange(1, len(means) + 1), means, label=display_name(method), **line_style)
        panel_title(axes, number, f"{benchmark}, {scenario}-incremental")
        axes.set_xlabel("tasks ended")
        axes.set_ylabel("average accuracy of seen tasks (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, 5)
    lines = [group for methods in shown.values() for group in methods.values()]
    held_out = any(run.settings.get("validation") for group in lines for run in group)
    return figure, (
        f"{'Accuracies are of held-out training data. ' if held_out else ''}"
        f"Mean of {format_count(map(len, lines), 'run')} a line.{not_shown_note(usable, shown.values())}"
    )


def mean_accuracy_at_ends(runs: Sequence[CompleteRun]) -> Array:
    """Return the mean over runs of the average accuracy of the tasks seen at the k-th end of a task."""
    curves = [RunCurves(run).accuracy_at_ends() for run in runs]
    length = max(map(len, curves))
    return np.array([np.mean([curve[k] for curve in curves if len(curve) > k]) for k in range(length)])


FIGURE = FigureSpec(
    name="learning-process",
    number="Figure 2",
    title="Learning process",
    caption="The learning process: each point is the end of a task's training, showing the average accuracy of all "
    "tasks seen by then.",
    needs="runs of two tasks or more that evaluate all tasks seen whenever one ends",
    grids=tuple(
        GridCommand(name, "all", scenarios="task,class", configs="0-8", preset="paper")
        for name in ("ps-cifar100", "ps-tiny-imagenet")
    ),
    draw=draw,
)
