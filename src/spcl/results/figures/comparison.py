"""Figure that compares single runs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spcl.errors import SpclError
from spcl.results.figures.curves import RunCurves, block_medians
from spcl.results.figures.drawing import check_format, write_figure
from spcl.results.figures.panels import legend_below, measure_axis, panel_title
from spcl.results.figures.style import WIDTH, figure_style, numbered_line_styles
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name

__all__ = ["comparison_figure", "comparison_path", "save_comparison"]

POINTS = 80


def comparison_figure(runs: Sequence[RunRecord]) -> Figure:
    """Draw complete runs: accuracy of the seen tasks whenever one ends, final accuracy of every task, κ after."""
    complete = complete_runs(runs)
    if not complete:
        raise SpclError(f"none of {len(runs)} runs is complete; finish the runs to compare them")
    with figure_style():
        figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
        panels = figure.subplot_mosaic([["ends", "kappa"], ["tasks", "tasks"]])
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
        legend_below(figure, 3)
    return figure


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
