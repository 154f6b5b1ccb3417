"""Numerical analysis of the gradient matrix while it is trained with."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from spcl.results.figures.comparable import comparable
from spcl.results.figures.curves import MEASURES, Curves, blocks, mean_curve
from spcl.results.figures.drawing import FigureSpec, MissingRunsError
from spcl.results.figures.panels import legend_below, letter, measure_axis
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import WIDTH, display, looks
from spcl.results.records import RunRecord

__all__ = ["GRADIENTS"]

POINTS = 48
SPACING = 12


def draw_gradients(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """κ, conflicts and magnitude similarity of the adjusted gradients over time, a line for each method."""
    cell = comparable(runs, "seed")
    methods = {
        method: measured
        for method, group in cell.items()
        if (measured := [curves for curves in map(Curves, group) if len(curves.stability("cosine", "after")[0])])
    }
    if not methods:
        raise MissingRunsError(f"none of {len(runs)} complete runs measured the gradients of two tasks or more")
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    look = looks(methods)
    for number, (axes, (measure, title)) in enumerate(zip(figure.subplots(1, 3), MEASURES.items(), strict=True)):
        for place, (method, group) in enumerate(methods.items()):
            curve = mean_curve([curves.stability(measure, "after") for curves in group])
            marks = look[method].points() | {"markevery": (place % SPACING, SPACING)}
            axes.plot(*blocks(curve, POINTS), label=display(method), **marks)
        measure_axis(axes, measure)
        letter(axes, number, title.capitalize())
        axes.set_xlabel("step")
    legend_below(figure, 5)
    run = next(iter(cell.values()))[0]
    seeds = {run.seed for group in cell.values() for run in group}
    silent = sorted(cell.keys() - methods.keys())
    missing = f" Not shown, as they form no adjusted gradients: {', '.join(map(display, silent))}." if silent else ""
    return figure, (
        f"{run.benchmark}, {run.scenario}-incremental, configuration {run.config}, "
        f"{'one seed' if len(seeds) == 1 else f'mean over {len(seeds)} seeds'}, "
        f"medians of {POINTS} stretches.{missing}"
    )


GRADIENTS = FigureSpec(
    name="gradients",
    number="Figure 4",
    title="Gradient matrix",
    caption="Numerical analysis of the adjusted gradient matrix during training.",
    needs="runs that measure stability",
    recipes=(Recipe("ps-cifar100", "all", seeds="0"),),
    draw=draw_gradients,
)
