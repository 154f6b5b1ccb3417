"""Numerical analysis of the convolutions, with and without the DBT penalty."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from spcl.results.figures.comparable import circumstances
from spcl.results.figures.curves import Array, counted, grouped
from spcl.results.figures.drawing import FigureSpec, MissingRunsError
from spcl.results.figures.panels import legend_below, letter, logarithmic
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import BLUE, VERMILLION, WIDTH, display
from spcl.results.records import RunRecord

__all__ = ["CONVOLUTIONS"]

STATISTICS = {"condition_number": "condition number", "norm": "norm", "correlation": "filter correlation"}
MARKS: dict[bool, dict[str, Any]] = {
    False: {"label": "without DBT", "color": BLUE, "marker": "s", "linestyle": (0, (4, 1.5))},
    True: {"label": "with DBT", "color": VERMILLION, "marker": "o", "linestyle": "-"},
}
MOST_NAMES = 6


def draw_convolutions(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Condition number, norm and filter correlation of every convolution at the end of training."""
    sides = _sides([run for run in runs if (run.result or {}).get("filters")])
    layers = list((sides[True][0].result or {})["filters"])
    places = np.arange(1, len(layers) + 1)
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    for number, (axes, (name, title)) in enumerate(zip(figure.subplots(1, 3), STATISTICS.items(), strict=True)):
        for penalised, mark in MARKS.items():
            axes.plot(places, layer_means(sides[penalised], name), **mark)
        axes.set_xlabel("convolution")
        letter(axes, number, title.capitalize())
        if name == "condition_number":
            logarithmic(axes)
        if len(layers) <= MOST_NAMES:
            axes.set_xticks(places)
    legend_below(figure, 2)
    without, with_ = sides[False], sides[True]
    return figure, (
        f"{with_[0].benchmark}; means over {counted([len(without)], 'run')} without DBT "
        f"({display(without[0].method)}) and {len(with_)} with it ({display(with_[0].method)}); "
        "convolutions in the order of the network."
    )


def layer_means(runs: Sequence[RunRecord], statistic: str) -> Array:
    """A statistic of each layer, mean over runs; infinite and unknown values are left out."""
    table = [[layer[statistic] for layer in (run.result or {})["filters"].values()] for run in runs]
    values = np.ma.masked_invalid(np.array(table, dtype=np.float64))
    means: Array = values.mean(axis=0).filled(np.nan)
    return means


def _sides(runs: Sequence[RunRecord]) -> dict[bool, list[RunRecord]]:
    """Runs of one method with and without the penalty."""
    if not runs:
        raise MissingRunsError("there is no complete run whose network has convolutions")
    ours_first = sorted(runs, key=lambda run: _base(run) != "soro")
    for cell in grouped(ours_first, lambda run: (circumstances(run, "seed", "config"), _base(run))).values():
        sides = grouped(cell, lambda run: bool(run.settings["method"]["alpha"] > 0))
        if len(sides) == 2:
            return sides
    raise MissingRunsError("no method was run both with and without it")


def _base(run: RunRecord) -> str:
    return run.method.removesuffix("+dbt")


CONVOLUTIONS = FigureSpec(
    name="convolutions",
    number="Figure 5",
    title="Convolutions",
    caption="Numerical analysis of the convolutional layers at the end of training, with and without the DBT-based "
    "orthogonality regularisation.",
    needs="runs of a network with convolutions, by one method with and without the DBT penalty",
    recipes=(Recipe("ps-cifar100", "soro,soro+dbt"),),
    draw=draw_convolutions,
)
