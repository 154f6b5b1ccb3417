"""The paper's figures of what happens during training: accuracy, gradients and convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spcl.results.compare import MEASURES
from spcl.results.figures.curves import (
    Array,
    RunCurves,
    block_medians,
    comparable_runs,
    mean_curve,
    not_shown_note,
    setup_key,
)
from spcl.results.figures.drawing import (
    BLUE,
    VERMILLION,
    WIDTH,
    GridCommand,
    MissingRunsError,
    figure,
    legend_below,
    line_styles,
    log_scale,
    measure_axis,
    new_figure,
    panel_grid,
    panel_title,
)
from spcl.results.names import display_name, format_count
from spcl.results.records import CompleteRun, RunRecord, complete_runs, group_by

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- learning process


@figure(
    "learning-process",
    number="Figure 2",
    title="Learning process",
    caption="The learning process: each point is the end of a task's training, showing the average accuracy of all "
    "tasks seen by then.",
    needs="runs of two tasks or more that evaluate all tasks seen whenever one ends",
    grids=tuple(
        GridCommand(name, "all", scenarios="task,class", configs="0-8", preset="paper")
        for name in ("ps-cifar100", "ps-tiny-imagenet")
    ),
)
def learning_process(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw a panel for each benchmark and scenario, with a line for each method."""
    from matplotlib.ticker import MaxNLocator

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


# -- gradients

POINTS = 48
MARKER_SPACING = 12


@figure(
    "gradients",
    number="Figure 4",
    title="Gradient matrix",
    caption="Numerical analysis of the adjusted gradient matrix during training.",
    needs="runs that measure stability",
    grids=(GridCommand("ps-cifar100", "all", seeds="0", preset="paper"),),
)
def gradients(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw κ, conflicts and magnitude similarity of the adjusted gradients over time, a line for each method."""
    runs = complete_runs(records)
    by_method = comparable_runs(runs, "seed")
    measured = {method: curves for method, group in by_method.items() if (curves := _measured_curves(group))}
    if not measured:
        raise MissingRunsError(f"none of {len(runs)} complete runs measured the gradients of two tasks or more")
    figure = new_figure(WIDTH, 3.4)
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


# -- convolutions

STATISTICS = {"condition_number": "condition number", "norm": "norm", "correlation": "filter correlation"}
LINE_STYLES: dict[bool, dict[str, Any]] = {
    False: {"label": "without DBT", "color": BLUE, "marker": "s", "linestyle": (0, (4, 1.5))},
    True: {"label": "with DBT", "color": VERMILLION, "marker": "o", "linestyle": "-"},
}
MOST_TICKS = 6


@figure(
    "convolutions",
    number="Figure 5",
    title="Convolutions",
    caption="Numerical analysis of the convolutional layers at the end of training, with and without the DBT-based "
    "orthogonality regularisation.",
    needs="runs of a network with convolutions, by one method with and without the DBT penalty",
    grids=(GridCommand("ps-cifar100", "soro,soro+dbt", preset="paper"),),
)
def convolutions(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw condition number, norm and filter correlation of every convolution at the end of training."""
    runs = complete_runs(records)
    without, with_ = _with_and_without_penalty([run for run in runs if run.result.filters])
    layers = np.arange(1, len(with_[0].result.filters) + 1)
    figure = new_figure(WIDTH, 2.7)
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
