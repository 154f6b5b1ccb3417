"""The three paradigms: multi-task, serial continual and parallel continual learning."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spcl.results.figures.comparable import circumstances
from spcl.results.figures.curves import grouped
from spcl.results.figures.drawing import FigureSpec
from spcl.results.figures.panels import draw_bars, letter
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import WIDTH, display, looks
from spcl.results.figures.sweeps import mean_accuracy
from spcl.results.records import RunRecord
from spcl.results.tables.tables import method_order
from spcl.streams import Timeline

__all__ = ["PARADIGMS"]

NAMES = {"joint": "Multi-task (MTL)", "serial": "Serial (SCL)", "parallel": "Parallel (PCL)"}
SKETCH = ((0, 39), (14, 53), (34, 73), (46, 85))


def draw_paradigms(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """The three timelines and, where one method was run under all three, how well it did."""
    cell = _compared(runs)
    figure = Figure(figsize=(WIDTH, 4.3 if cell else 1.9), layout="constrained")
    rows = figure.subfigures(2 if cell else 1, 1, squeeze=False, height_ratios=(1, 1.4) if cell else None)[:, 0]
    panels = rows[0].subplots(1, len(NAMES), sharex=True, sharey=True)
    for number, (axes, (paradigm, title)) in enumerate(zip(panels, NAMES.items(), strict=True)):
        timeline = _timeline(paradigm, cell)
        draw_bars(axes, timeline, [f"task {task}" for task in range(1, len(timeline.spans) + 1)])
        letter(axes, number, title)
        axes.set_xlabel("step" if cell else "time")
    panels[0].set_xlim(0, _timeline("serial", cell).steps)
    if not cell:
        panels[0].set_xticks([])
        return figure, ""
    _draw_accuracies(rows[1].subplots(), cell)
    run = cell[0]
    return figure, (
        f"Timelines of configuration {_parallel(cell).config}; {run.benchmark}, {run.scenario}-incremental, mean and "
        "standard deviation over seeds."
    )


def _compared(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs that differ in nothing but paradigm and method, if all paradigms are among them."""
    cells = grouped(runs, lambda run: circumstances(run, "seed", "config", "paradigm")).values()
    return next((cell for cell in cells if {run.paradigm for run in cell} >= NAMES.keys()), [])


def _parallel(cell: Sequence[RunRecord]) -> RunRecord:
    return next(run for run in cell if run.paradigm == "parallel")


def _timeline(paradigm: str, cell: Sequence[RunRecord]) -> Timeline:
    parallel = Timeline((_parallel(cell).timeline if cell else ()) or SKETCH)
    return {
        "joint": Timeline.joint(parallel.durations),
        "serial": Timeline.serial(parallel.durations),
        "parallel": parallel,
    }[paradigm]


def _draw_accuracies(axes: Axes, cell: Sequence[RunRecord]) -> None:
    methods = grouped(sorted(cell, key=lambda run: method_order(run.method)), lambda run: run.method)
    look = looks(methods)
    places = np.arange(len(NAMES))
    for offset, (method, runs) in zip(np.linspace(-0.25, 0.25, len(methods) + 2)[1:-1], methods.items(), strict=True):
        by_paradigm = grouped(runs, lambda run: run.paradigm)
        points = [mean_accuracy(by_paradigm[name]) if name in by_paradigm else (np.nan, 0.0) for name in NAMES]
        means, deviations = zip(*points, strict=True)
        marks = look[method].points() | {"linestyle": "none"}
        axes.errorbar(places + offset, means, deviations, capsize=2.5, label=display(method), **marks)
    axes.set_xticks(places, list(NAMES.values()))
    axes.set_xlim(-0.5, len(NAMES) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("accuracy (%)")
    letter(axes, len(NAMES), "Accuracy at the end")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


PARADIGMS = FigureSpec(
    name="paradigms",
    number="Figure 6",
    title="MTL, SCL and PCL",
    caption="Multi-task learning trains all tasks at once, serial continual learning one after another, parallel "
    "continual learning each from when it arises; the memory (hatched) starts when the first task has ended.",
    needs="nothing; accuracies are added where one benchmark was run under all three paradigms",
    recipes=(Recipe("ps-glyphs", "er,soro", sweeps=("paradigm=parallel,joint,serial",)),),
    draw=draw_paradigms,
)
