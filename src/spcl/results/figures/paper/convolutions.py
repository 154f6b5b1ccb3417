"""Figure 5: numerical analysis of the convolutions, with and without the DBT penalty."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from spcl.results.figures.comparable import setup_key
from spcl.results.figures.curves import Array
from spcl.results.figures.panels import legend_below, log_scale, panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import BLUE, VERMILLION, WIDTH
from spcl.results.formatting import format_count
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name

__all__ = ["FIGURE"]

STATISTICS = {"condition_number": "condition number", "norm": "norm", "correlation": "filter correlation"}
LINE_STYLES: dict[bool, dict[str, Any]] = {
    False: {"label": "without DBT", "color": BLUE, "marker": "s", "linestyle": (0, (4, 1.5))},
    True: {"label": "with DBT", "color": VERMILLION, "marker": "o", "linestyle": "-"},
}
MOST_TICKS = 6


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw condition number, norm and filter correlation of every convolution at the end of training."""
    runs = complete_runs(records)
    without, with_ = _with_and_without_penalty([run for run in runs if run.result.filters])
    layers = np.arange(1, len(with_[0].result.filters) + 1)
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    for number, (axes, (name, title)) in enumerate(zip(figure.subplots(1, 3), STATISTICS.items(), strict=True)):
        for penalised, line_style in LINE_STYLES.items():
            axes.plot(layers, layer_means(with_ if penalised else without, name), **line_style)
        axes.set_xlabel("convolution")
        panel_title(axes, number, title.capitalize())
        if name == "condition_number":
            log_scale(axes)
        if len(layers) <= MOST_TICKS:
            axes.set_xticks(layers)
    legend_below(figure, 2)
    return figure, (
        f"{with_[0].benchmark}; means over {format_count([len(without)], 'run')} without DBT "
        f"({display_name(without[0].method)}) and {len(with_)} with it ({display_name(with_[0].method)}); "
        "convolutions in the order of the network."
    )


def layer_means(runs: Sequence[CompleteRun], statistic: str) -> Array:
    """Return a statistic of each layer, averaged over the runs in which it is finite."""
    table = [[layer[statistic] for layer in run.result.filters.values()] for run in runs]
    values = np.ma.masked_invalid(np.array(table, dtype=np.float64))
    means: Array = values.mean(axis=0).filled(np.nan)
    return means


def _with_and_without_penalty(runs: Sequence[CompleteRun]) -> tuple[list[CompleteRun], list[CompleteRun]]:
    """Return runs of one method without and with the penalty."""
    if not runs:
        raise MissingRunsError("there is no complete run whose network has convolutions")
    soro_first = sorted(runs, key=lambda run: _base_method(run) != "soro")
    for group in group_by(soro_first, lambda run: (setup_key(run, "seed", "config"), _base_method(run))).values():
        by_penalty = group_by(group, lambda run: bool(run.settings["method"]["alpha"] > 0))
        if len(by_penalty) == 2:
            return by_penalty[False], by_penalty[True]
    raise MissingRunsError("no method was run both with and without it")


def _base_method(run: CompleteRun) -> str:
    return run.method.removesuffix("+dbt")


FIGURE = FigureSpec(
    name="convolutions",
    number="Figure 5",
    title="Convolutions",
    caption="Numerical analysis of the convolutional layers at the end of training, with and without the DBT-based "
    "orthogonality regularisation.",
    needs="runs of a network with convolutions, by one method with and without the DBT penalty",
    grids=(GridCommand("ps-cifar100", "soro,soro+dbt", preset="paper"),),
    draw=draw,
)
