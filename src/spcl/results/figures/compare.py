"""Runs side by side."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spcl.errors import SpclError
from spcl.files import user_errors
from spcl.results.figures.curves import Curves, blocks
from spcl.results.figures.panels import legend_below, letter, measure_axis
from spcl.results.figures.style import WIDTH, display, distinct_looks, style
from spcl.results.records import RunRecord

__all__ = ["compare_figure", "save_comparison"]

POINTS = 80


def compare_figure(runs: Sequence[RunRecord]) -> Figure:
    """Complete runs side by side: accuracy of seen tasks at each task's end, of every task at the end, and κ after."""
    complete = [run for run in runs if run.result is not None]
    if not complete:
        raise SpclError(f"none of {len(runs)} runs is complete, so there is nothing to compare")
    names = [f"{number}: {display(run.label)}" for number, run in enumerate(complete, 1)]
    with style():
        figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
        panels = figure.subplot_mosaic([["ends", "kappa"], ["tasks", "tasks"]])
        for run, name, look in zip(complete, names, distinct_looks(len(complete)), strict=True):
            curves = Curves(run)
            ends = curves.at_ends()
            panels["ends"].plot(np.arange(1, len(ends) + 1), ends, label=name, **look.points())
            panels["kappa"].plot(*blocks(curves.stability("condition_number", "after"), POINTS), **look.curve())
        _draw_tasks(panels["tasks"], complete)
        letter(panels["ends"], 0, "Accuracy of seen tasks when one ends")
        letter(panels["kappa"], 1, "Condition number after adjustment")
        letter(panels["tasks"], 2, "Accuracy of every task at the end")
        panels["ends"].set(xlabel="tasks ended", ylabel="accuracy (%)")
        panels["ends"].xaxis.set_major_locator(MaxNLocator(integer=True))
        panels["kappa"].set_xlabel("step")
        measure_axis(panels["kappa"], "condition_number")
        legend_below(figure, 3)
    return figure


def _draw_tasks(axes: Axes, runs: Sequence[RunRecord]) -> None:
    """For every task a group of bars, one for each run."""
    finals = [{name: task["final"] for name, task in (run.result or {})["tasks"].items()} for run in runs]
    names = list(dict.fromkeys(name for final in finals for name in final))
    width = 0.8 / len(runs)
    for place, (final, look) in enumerate(zip(finals, distinct_looks(len(runs)), strict=True)):
        shift = (place - (len(runs) - 1) / 2) * width
        heights = [final.get(name, 0.0) for name in names]
        axes.bar(np.arange(len(names)) + shift, heights, width=0.92 * width, color=look.colour)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("accuracy (%)")


def save_comparison(runs: Sequence[RunRecord], path: Path) -> None:
    """Draw runs side by side into a file."""
    figure = compare_figure(runs)
    with user_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
