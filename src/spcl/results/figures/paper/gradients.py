"""Figure 4: numerical analysis of the adjusted gradient matrix during training."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from spcl.results.figures.comparable import comparable_runs
from spcl.results.figures.curves import RunCurves, block_medians, mean_curve
from spcl.results.figures.panels import legend_below, measure_axis, panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import WIDTH, line_styles
from spcl.results.formatting import format_count
from spcl.results.grid_command import GridCommand
from spcl.results.measures import MEASURES
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name

__all__ = ["FIGURE"]

POINTS = 48
MARKER_SPACING = 12


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw κ, conflicts and magnitude similarity of the adjusted gradients over time, a line for each method."""
    runs = complete_runs(records)
    by_method = comparable_runs(runs, "seed")
    measured = {method: curves for method, group in by_method.items() if (curves := _measured_curves(group))}
    if not measured:
        raise MissingRunsError(f"none of {len(runs)} complete runs measured the gradients of two tasks or more")
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    styles = line_styles(measured)
    for number, (axes, (measure, title)) in enumerate(zip(figure.subplots(1, 3), MEASURES.items(), strict=True)):
        for index, (method, curves) in enumerate(measured.items()):
            curve = mean_curve([run.stability(measure, "after") for run in curves])
            line_style = styles[method].marked_line() | {"markevery": (index % MARKER_SPACING, MARKER_SPACING)}
            axes.plot(*block_medians(curve, POINTS), label=display_name(method), **line_style)
        measure_axis(axes, measure)
        panel_title(axes, number, title.capitalize())
        axes.set_xlabel("step")
    legend_below(figure, 5)
    details = _details(by_method, sorted(by_method.keys() - measured.keys()))
    return figure, details + _infinite_note(measured)


def _measured_curves(runs: Sequence[CompleteRun]) -> list[RunCurves]:
    """Return the curves of the runs that measured adjusted gradients."""
    return [curves for curves in map(RunCurves, runs) if len(curves.stability("cosine", "after")[0])]


def _details(by_method: Mapping[str, Sequence[CompleteRun]], unmeasured: Sequence[str]) -> str:
    run = next(iter(by_method.values()))[0]
    seeds = [len(group) for group in by_method.values()]
    mean = "one seed" if max(seeds) == 1 else f"mean over {format_count(seeds, 'seed')}"
    names = ", ".join(map(display_name, unmeasured))
    return (
        f"{run.benchmark}, {run.scenario}-incremental, configuration {run.config}, {mean}, "
        f"medians of {POINTS} stretches."
        f"{f' Not shown, as they form no adjusted gradients: {names}.' if names else ''}"
    )


def _infinite_note(measured: Mapping[str, Sequence[RunCurves]]) -> str:
    """Return the share of steps in which κ cannot be drawn, by method: a gradient with weight 0 makes it infinite."""
    shares = {method: float(np.mean([run.infinite_share() for run in curves])) for method, curves in measured.items()}
    parts = [f"{display_name(method)} {share:.0%}" for method, share in shares.items() if share >= 0.005]
    if not parts:
        return ""
    return f" κ is infinite, and not drawn, where a gradient has the weight 0 (of the steps: {', '.join(parts)})."


FIGURE = FigureSpec(
    name="gradients",
    number="Figure 4",
    title="Gradient matrix",
    caption="Numerical analysis of the adjusted gradient matrix during training.",
    needs="runs that measure stability",
    grids=(GridCommand("ps-cifar100", "all", seeds="0", preset="paper"),),
    draw=draw,
)
