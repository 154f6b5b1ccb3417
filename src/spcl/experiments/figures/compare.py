"""Runs side by side."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from spcl.errors import SpclError
from spcl.experiments.figures.curves import Curves, blocks
from spcl.experiments.figures.panels import legend_below, letter, measure_axis
from spcl.experiments.figures.style import WIDTH, display, looks, style
from spcl.experiments.index import RunRecord

__all__ = ["compare_figure"]

POINTS = 80


def compare_figure(runs: Sequence[RunRecord]) -> Figure:
    """Complete runs side by side: accuracy of seen tasks at each task's end, of every task at the end, and κ after."""
    complete = [run for run in runs if run.result is not None]
    if not complete:
        raise SpclError(f"none of {len(runs)} runs is complete, so there is nothing to compare")
    names = [f"{number}: {display(run.label)}" for number, run in enumerate(complete, 1)]
    look = looks(names)
    with style():
        figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
        panels = figure.subplot_mosaic([["ends", "kappa"], ["tasks", "tasks"]])
        for place, (run, name) in enumerate(zip(complete, names, strict=True)):
            curves, marks = Curves(run), look[name]
            ends = curves.at_ends()
            panels["ends"].plot(np.arange(1, len(ends) + 1), ends, label=name, **marks.points())
            panels["kappa"].plot(*blocks(curves.stability("condition_number", "after"), POINTS), **marks.curve())
            tasks = (run.result or {})["tasks"]
            width = 0.8 / len(complete)
            panels["tasks"].bar(
                np.arange(len(tasks)) + (place - (len(complete) - 1) / 2) * width,
                [values["final"] for values in tasks.values()],
                width=width,
                color=marks.colour,
                tick_label=list(tasks) if place == 0 else None,
            )
        letter(panels["ends"], 0, "Accuracy of seen tasks when one ends")
        letter(panels["kappa"], 1, "Condition number after adjustment")
        letter(panels["tasks"], 2, "Accuracy of every task at the end")
        panels["ends"].set(xlabel="tasks ended", ylabel="accuracy (%)")
        panels["tasks"].set(ylabel="accuracy (%)")
        panels["kappa"].set_xlabel("step")
        measure_axis(panels["kappa"], "condition_number")
        legend_below(figure, 3)
    return figure
