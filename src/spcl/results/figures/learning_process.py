"""The learning process: how well the tasks seen so far are known whenever one ends."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spcl.results.figures.comparable import comparable, left_out_note
from spcl.results.figures.curves import Array, Curves, counted, grouped
from spcl.results.figures.drawing import FigureSpec, MissingRunsError
from spcl.results.figures.panels import legend_below, letter
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import WIDTH, display, looks
from spcl.results.records import RunRecord

__all__ = ["LEARNING_PROCESS"]


def draw_learning_process(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """A panel for each benchmark and scenario, a line for each method."""
    usable = [run for run in runs if run.settings["evaluate"] == "seen" and len((run.result or {})["tasks"]) > 1]
    if not usable:
        raise MissingRunsError(f"none of {len(runs)} complete runs evaluated all tasks seen when one ended")
    cells = {
        cell: comparable(group, "seed", "config")
        for cell, group in grouped(usable, lambda run: (run.benchmark, run.scenario)).items()
    }
    columns = min(2, len(cells))
    rows = -(-len(cells) // columns)
    figure = Figure(figsize=(WIDTH if columns > 1 else 0.7 * WIDTH, 2.7 * rows + 0.7), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    look = looks(run.method for run in usable)
    for number, (axes, ((benchmark, scenario), cell)) in enumerate(zip(panels.flat, cells.items(), strict=False)):
        for method, group in cell.items():
            means = mean_at_ends(group)
            axes.plot(np.arange(1, len(means) + 1), means, label=display(method), **look[method].points())
        letter(axes, number, f"{benchmark}, {scenario}-incremental")
        axes.set_xlabel("tasks ended")
        axes.set_ylabel("average accuracy of seen tasks (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels.flat[len(cells) :]:
        axes.remove()
    legend_below(figure, 5)
    counts = (len(group) for cell in cells.values() for group in cell.values())
    held_out = any(run.settings["validation"] for cell in cells.values() for group in cell.values() for run in group)
    return figure, (
        f"{'Accuracies are of held-out training data. ' if held_out else ''}Mean of {counted(counts, 'run')} a line."
        f"{left_out_note(usable, cells.values())}"
    )


def mean_at_ends(runs: Sequence[RunRecord]) -> Array:
    """The mean over runs of the average accuracy of the tasks seen at the k-th end of a task."""
    curves = [Curves(run).at_ends() for run in runs]
    length = max(map(len, curves))
    return np.array([np.mean([curve[place] for curve in curves if len(curve) > place]) for place in range(length)])


LEARNING_PROCESS = FigureSpec(
    name="learning-process",
    number="Figure 2",
    title="Learning process",
    caption="The learning process: each point is the end of a task's training, showing the average accuracy of all "
    "tasks seen by then.",
    needs="runs of two tasks or more that evaluate all tasks seen whenever one ends",
    recipes=(Recipe("ps-emnist", "all", scenarios="task,class", configs="0-8"),),
    draw=draw_learning_process,
)
