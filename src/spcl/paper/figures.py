"""The paper's figures: two tasks, what happens during training, and final accuracies beside its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spcl.paper.numbers import is_papers_problem
from spcl.results.compare import MEASURES
from spcl.results.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    OURS,
    PURPLE,
    VERMILLION,
    WIDTH,
    Array,
    GridCommand,
    MissingRunsError,
    RunCurves,
    SweepLine,
    block_medians,
    comparable_runs,
    draw_points,
    draw_timeline_bars,
    figure,
    legend_below,
    line_styles,
    log_scale,
    mark_task_changes,
    mean_accuracy,
    mean_curve,
    measure_axis,
    new_figure,
    not_shown_note,
    panel_grid,
    panel_title,
    runs_note,
    settings_key,
    setup_key,
    sweep_lines,
)
from spcl.results.names import PublishedResult, display_name, format_count, method_order
from spcl.results.records import CompleteRun, RunRecord, complete_runs, group_by
from spcl.results.tables import Measure, data_share, make_tables
from spcl.streams import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- overview

BENCHMARKS = {"ps-emnist": "EMNIST", "ps-cifar100": "CIFAR-100", "ps-tiny-imagenet": "Tiny-ImageNet"}
SCENARIOS = ("task", "class")
PRESETS = {"released": (VERMILLION, "o"), "paper": (BLUE, "s"), "default": (GREEN, "^"), "plus": (PURPLE, "v")}
ROW_HEIGHT = 0.19


@dataclass(frozen=True)
class Point:
    """The accuracy of one method, ours and the paper's, if it has one."""

    scenario: str
    benchmark: str
    preset: str
    method: str
    ours: Measure
    paper: PublishedResult | None


@figure(
    "overview",
    number="Tables 1 and 2",
    title="All methods beside the paper's numbers",
    caption="Final accuracy of every method on every benchmark, in both scenarios, beside the paper's.",
    needs="complete runs of the paper's benchmarks",
    grids=tuple(
        GridCommand(name, "all", scenarios="task,class", configs="0-8", preset="released") for name in BENCHMARKS
    ),
)
def overview(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw a row for each method and a column for each benchmark and scenario: our accuracy beside the paper's."""
    usable = [run for run in records if is_papers_problem(run) and run.preset in PRESETS]
    points, remarks = _points(usable)
    columns = group_by(points, lambda point: (point.scenario, point.benchmark))
    order = [(scenario, name) for scenario in SCENARIOS for name in BENCHMARKS if (scenario, name) in columns]
    if not order:
        raise MissingRunsError("none of them is complete and of the paper's problem")
    methods = sorted({point.method for point in points}, key=method_order)
    figure = new_figure(WIDTH, 1.4 + ROW_HEIGHT * len(methods))
    panels = figure.subplots(1, len(order), sharey=True, squeeze=False)[0]
    shares = _data_shares(complete_runs(usable))
    for axes, (scenario, name) in zip(panels, order, strict=True):
        _draw_column(axes, columns[scenario, name], methods)
        axes.set_title(f"{BENCHMARKS[name]}\n{scenario}-incr.{shares.get((scenario, name), '')}", fontsize=8)
    panels[0].set_yticks(range(len(methods)), [display_name(method) for method in methods])
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    legend_below(figure, 4)
    return figure, " ".join([_agreement(columns[key]) for key in order] + remarks)


def _points(records: Sequence[RunRecord]) -> tuple[list[Point], list[str]]:
    """Return the points of runs of the paper's problems, and the remarks of their tables."""
    points: dict[tuple[str, ...], Point] = {}
    remarks: dict[str, None] = {}
    for preset, runs in group_by(records, lambda run: run.preset).items():
        for table in make_tables(runs, paper=True):
            methods = {row.label: row.method for row in table.rows}
            remarks |= dict.fromkeys(table.remarks)
            for (label, benchmark), cell in table.cells.items():
                if not cell.runs:
                    continue
                key = (table.scenario, benchmark, preset, methods[label])
                if key in points:
                    raise MissingRunsError(f"{methods[label]} has variants on {benchmark} with preset {preset}")
                points[key] = Point(*key, cell.accuracy, cell.paper)
    return list(points.values()), list(remarks)


def _data_shares(runs: Sequence[CompleteRun]) -> dict[tuple[str, str], str]:
    """Return by scenario and benchmark a line with the share of the data that its runs had; none if all had all."""
    groups = group_by(runs, lambda run: (run.scenario, run.benchmark))
    shares = {key: sorted({share for run in group if (share := data_share(run))}) for key, group in groups.items()}
    if all(share == "all data" for found in shares.values() for share in found):
        return {}
    return {key: "\n" + ", ".join(found) for key, found in shares.items()}


def _draw_column(axes: Axes, points: Sequence[Point], methods: Sequence[str]) -> None:
    """Draw the points of one benchmark and scenario, each joined with the paper's."""
    rows = {method: row for row, method in enumerate(methods)}
    published = {point.method: point.paper for point in points if point.paper}
    for method, paper in published.items():
        bar: dict[str, Any] = {"xerr": paper.accuracy_std, "color": BLACK, "markerfacecolor": "white", "linewidth": 0.8}
        label = "paper's tables" if method == next(iter(published)) else None
        axes.errorbar(paper.accuracy, rows[method], fmt="D", markersize=3.5, zorder=4, label=label, **bar)
    for preset, (colour, marker) in PRESETS.items():
        own = [point for point in points if point.preset == preset]
        for point in own:
            if point.paper:
                ends = [point.ours.mean, point.paper.accuracy]
                axes.plot(ends, [rows[point.method]] * 2, color=colour, linewidth=0.7, alpha=0.5, zorder=2)
        if own:
            places = [point.ours.mean for point in own], [rows[point.method] for point in own]
            axes.plot(*places, marker, color=colour, markersize=3.5, zorder=3, label=f"ours, preset {preset}")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("A (%)", fontsize=8)


def _agreement(points: Sequence[Point]) -> str:
    """Return the rank correlation of our accuracies and the paper's, by preset, as a sentence."""
    parts = []
    for preset, own in group_by([point for point in points if point.paper], lambda point: point.preset).items():
        pairs = [(point.ours.mean, point.paper.accuracy) for point in own if point.paper]
        if len(pairs) > 2 and all(len(set(values)) > 1 for values in zip(*pairs, strict=True)):
            parts.append(f"{_rank_correlation(*np.array(pairs).T):.2f} ({preset}, {len(pairs)} methods)")
    first = points[0]
    name = f"{BENCHMARKS[first.benchmark]} {first.scenario}-incrementally"
    return f"Rank correlation with the paper on {name}: {', '.join(parts) or 'unknown'}."


def _rank_correlation(ours: Array, theirs: Array) -> float:
    """Return Spearman's rank correlation.

    >>> _rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0]))
    0.5
    """
    from scipy.stats import spearmanr  # slow to import

    return float(spearmanr(ours, theirs).statistic)


# -- paradigms

NAMES = {"joint": "Multi-task (MTL)", "serial": "Serial (SCL)", "parallel": "Parallel (PCL)"}
EXAMPLE = ((0, 39), (14, 53), (34, 73), (46, 85))
"""The timeline that is drawn where there are no runs."""


@figure(
    "paradigms",
    number="Figure 6",
    title="MTL, SCL and PCL",
    caption="Multi-task learning trains all tasks at once, serial continual learning one after another, parallel "
    "continual learning each from when it arises; the memory (hatched) starts when the first task has ended.",
    needs="nothing; accuracies are added where one benchmark was run under all three paradigms",
    grids=(GridCommand("ps-glyphs", "er,soro", sweeps=("paradigm=parallel,joint,serial",)),),
)
def paradigms(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the three timelines and, where one method was run under all three, its accuracies."""
    compared_records = _runs_of_all_paradigms(records)
    compared = complete_runs(compared_records)
    figure = new_figure(WIDTH, 4.3 if compared else 1.9)
    ratios = (1, 1.4) if compared else None
    rows = figure.subfigures(2 if compared else 1, 1, squeeze=False, height_ratios=ratios)[:, 0]
    panels = rows[0].subplots(1, len(NAMES), sharex=True, sharey=True)
    for number, (axes, (paradigm, title)) in enumerate(zip(panels, NAMES.items(), strict=True)):
        draw_timeline_bars(axes, _timeline(paradigm, compared))
        panel_title(axes, number, title)
        axes.set_xlabel("step" if compared else "time")
    panels[0].set_xlim(0, _timeline("serial", compared).steps)
    if not compared:
        panels[0].set_xticks([])
        return figure, ""
    _draw_accuracies(rows[1].subplots(), compared)
    run = compared[0]
    return figure, (
        f"Timelines of configuration {_parallel_run(compared).config}; {run.benchmark}, {run.scenario}-incremental, "
        f"{runs_note(compared_records)}"
    )


def _runs_of_all_paradigms(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return runs that differ only in paradigm and method, if complete ones of all paradigms are among them."""
    groups = group_by(records, lambda run: setup_key(run, "seed", "config", "paradigm")).values()
    return next((group for group in groups if {run.paradigm for run in complete_runs(group)} >= NAMES.keys()), [])


def _parallel_run(runs: Sequence[CompleteRun]) -> CompleteRun:
    return next(run for run in runs if run.paradigm == "parallel")


def _timeline(paradigm: str, runs: Sequence[CompleteRun]) -> Timeline:
    parallel = Timeline((_parallel_run(runs).result.timeline if runs else ()) or EXAMPLE)
    return {
        "joint": Timeline.joint(parallel.durations),
        "serial": Timeline.serial(parallel.durations),
        "parallel": parallel,
    }[paradigm]


def _draw_accuracies(axes: Axes, runs: Sequence[CompleteRun]) -> None:
    methods = group_by(sorted(runs, key=lambda run: method_order(run.recipe)), lambda run: run.recipe)
    styles = line_styles(methods)
    for offset, (method, group) in zip(np.linspace(-0.25, 0.25, len(methods) + 2)[1:-1], methods.items(), strict=True):
        by_paradigm = group_by(group, lambda run: run.paradigm)
        positions = {tick + offset: name for tick, name in enumerate(NAMES) if name in by_paradigm}
        points = {position: mean_accuracy(by_paradigm[name]) for position, name in positions.items()}
        draw_points(axes, points, label=display_name(method), **styles[method].marked_line() | {"linestyle": "none"})
    axes.set_xticks(range(len(NAMES)), list(NAMES.values()))
    axes.set_xlim(-0.5, len(NAMES) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("accuracy (%)")
    panel_title(axes, len(NAMES), "Accuracy at the end")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


# -- hyperparameters

SYMBOLS = {"method.alpha": "α", "method.sigma": "σ", "method.lambda_": "λ"}


SWEEPS = (
    "method.alpha=0,1e-6,1e-5,1e-4,1e-3,1e-2,1e-1",
    "method.sigma=1,10,50,100,200,1000",
    "method.lambda_=0,1,10,100,1000",
    "method.iterations=0",
)


@figure(
    "hyperparameters",
    number="Figure 7",
    title="Hyper-parameters",
    caption="Choice of the hyper-parameters α (eq. 4), σ and λ (eq. 9).",
    needs="runs by soro or soro+dbt that differ only in α, σ or λ",
    grids=tuple(GridCommand("ps-cifar100", "soro+dbt", preset="paper", sweeps=(sweep,)) for sweep in SWEEPS),
)
def hyperparameters(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw accuracy against each hyper-parameter, the others at their defaults."""
    candidates = [run for run in records if run.method in ("soro", "soro+dbt")]
    relaxed = [run for run in candidates if run.settings["method"]["iterations"] > 0]
    lines = {name: found[0] for name in SYMBOLS if (found := sweep_lines(relaxed, name))}
    if not lines:
        count = len(complete_runs(candidates))
        raise MissingRunsError(f"none of {count} complete runs by soro and soro+dbt differ in just one of them")
    figure = new_figure(WIDTH, 2.7)
    panels = figure.subplots(1, len(lines), squeeze=False, sharey=True)[0]
    shown: list[RunRecord] = []
    strict: list[RunRecord] = []
    for number, (axes, (name, line)) in enumerate(zip(panels, lines.items(), strict=True)):
        points = line.points()
        draw_points(axes, points, color=VERMILLION, marker="o", label="accuracy")
        _log_scale(axes, list(points))
        axes.set_xlabel(SYMBOLS[name])
        panel_title(axes, number, f"{SYMBOLS[name]} ({name.removeprefix('method.').rstrip('_')})")
        strict += _draw_limit(axes, line, candidates)
        shown += line.records
    panels[0].set_ylabel("accuracy (%)")
    panels[0].legend()
    run = lines[next(iter(lines))].first
    return figure, (
        f"{run.benchmark}, {run.scenario}-incremental, {display_name(run.method)}; {runs_note([*shown, *strict])}"
        f"{' Dashed: strict orthogonality, ĜᵀĜ = I.' if strict else ''}"
    )


def _draw_limit(axes: Axes, line: SweepLine, records: Sequence[RunRecord]) -> list[RunRecord]:
    """Draw the accuracy of Ĝ = UVᵀ, the starting point of Algorithm 1, and return its runs, without any iteration."""
    varied = ("seed", "config", "method.iterations", *SYMBOLS)
    strict = [
        run
        for run in records
        if run.settings["method"]["iterations"] == 0 and settings_key(run, *varied) == settings_key(line.first, *varied)
    ]
    if complete := complete_runs(strict):
        axes.axhline(mean_accuracy(complete).mean, color=BLACK, linestyle="--", label="strict orthogonality")
    return strict if complete else []


def _log_scale(axes: Axes, values: Sequence[float]) -> None:
    """Make the horizontal axis logarithmic, linear near 0 where that is among the values."""
    positive = [value for value in values if value > 0]
    if len(positive) == len(values):
        axes.set_xscale("log")
    elif positive:
        axes.set_xscale("symlog", linthresh=min(positive))


# -- rehearsal

BUDGETS = "memory_budget=500,1000,2000,3000,4000,5000"


@figure(
    "rehearsal",
    number="Figure 8",
    title="Rehearsal size",
    caption="Accuracy against the size of the rehearsal memory.",
    needs="runs that differ only in memory_budget",
    grids=(GridCommand("ps-cifar100", "soro,soro+dbt", preset="paper", sweeps=(BUDGETS,)),),
)
def rehearsal(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw accuracy against the number of samples in memory, with a line for each method."""
    lines = sweep_lines(records, "memory_budget")
    if not lines:
        raise MissingRunsError(
            f"none of {len(complete_runs(records))} complete runs differ only in their memory budget"
        )
    first = lines[0].first
    by_method: dict[str, SweepLine] = {}
    for line in lines:
        if _setup(line.first) == _setup(first):
            by_method.setdefault(line.first.recipe, line)
    figure = new_figure(0.6 * WIDTH, 2.8)
    axes = figure.subplots()
    styles = line_styles(by_method)
    for method, line in sorted(by_method.items(), key=lambda item: method_order(item[0])):
        draw_points(axes, line.points(), label=display_name(method), **styles[method].marked_line())
    axes.set_xlabel("samples in memory")
    axes.set_ylabel("accuracy (%)")
    axes.legend()
    shown = [run for line in by_method.values() for run in line.records]
    return figure, f"{first.benchmark}, {first.scenario}-incremental; {runs_note(shown)}"


def _setup(run: CompleteRun) -> object:
    return setup_key(run, "seed", "config", "memory_budget")


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
        units = "sources" if any(run.result.task_of for group in methods.values() for run in group) else "tasks"
        axes.set_xlabel(f"{units} ended")
        axes.set_ylabel(f"average accuracy of seen {units} (%)")
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


# -- two tasks


def two_task_runs(runs: Sequence[CompleteRun]) -> list[CompleteRun]:
    """Return the runs of two tasks whose second task joins while the first trains."""
    found = []
    for run in runs:
        timeline = run.result.timeline
        if len(timeline) == 2 and 0 < timeline[1][0] < timeline[0][1]:
            found.append(run)
    if not found:
        raise MissingRunsError(f"none of {len(runs)} complete runs has two tasks whose second joins later")
    return found


def evaluated_over_time(runs: Sequence[CompleteRun]) -> list[CompleteRun]:
    """Return the runs that evaluate also between the ends of tasks."""
    return [run for run in runs if run.settings["evaluate_every"]]


# -- toy

WITHOUT_SPCL = "er"


@figure(
    "toy",
    number="Figure 1",
    title="Toy experiment",
    caption="A toy experiment with two tasks: the first is trained alone until, at the dashed line, the second joins; "
    "at the dotted line the first ends.",
    needs="runs of two tasks by er and by soro or soro+dbt, evaluated along the way",
    grids=(GridCommand("toy-cifar10", "er,soro+dbt", seeds="0", assignments=("evaluate_every=10",)),),
)
def toy(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw κ, conflicts, magnitude similarity and accuracy over time, with and without SPCL."""
    runs = complete_runs(records)
    plain, stable = (RunCurves(run) for run in _pair(runs))
    figure = new_figure(WIDTH, 5.0)
    panels = figure.subplots(2, 2, sharex=True)
    for number, (axes, (measure, title)) in enumerate(zip(panels.flat, MEASURES.items(), strict=False)):
        axes.plot(*plain.stability(measure, "before"), color=BLUE, linewidth=0.9, label="without SPCL")
        axes.plot(*stable.stability(measure, "after"), color=VERMILLION, linewidth=1.4, label="with SPCL")
        measure_axis(axes, measure)
        panel_title(axes, number, title.capitalize())
    _draw_accuracies_of_pair(panels[1, 1], plain, stable)
    for axes in panels.flat:
        mark_task_changes(axes, plain.timeline)
    for axes in panels[1]:
        axes.set_xlabel("step")
    legend_below(figure, 4)
    run = stable.run
    return figure, (
        f"{run.benchmark}, {run.scenario}-incremental, configuration {run.config}, seed {run.seed}; "
        f"without SPCL: {display_name(plain.run.method)}, with SPCL: {display_name(run.method)}."
    )


def _draw_accuracies_of_pair(axes: Axes, plain: RunCurves, stable: RunCurves) -> None:
    for number, (dashes, marker) in enumerate((("-", "o"), ((0, (4, 1.5)), "s"))):
        marks: dict[str, Any] = {"linestyle": dashes, "marker": marker, "markersize": 2.5}
        for curves, colour in ((plain, BLUE), (stable, VERMILLION)):
            axes.plot(*curves.accuracy(curves.tasks[number]), color=colour, **marks)
        axes.plot([], [], color=GREY, label=f"task {number + 1}", **marks)
    axes.set_ylabel("accuracy (%)")
    panel_title(axes, 3, "Accuracy")


def _pair(runs: Sequence[CompleteRun]) -> tuple[CompleteRun, CompleteRun]:
    """Return two runs with the same setup, without and with SPCL."""
    evaluated = evaluated_over_time(two_task_runs(runs))
    if not evaluated:
        raise MissingRunsError("runs of two tasks were evaluated only when a task ended")
    for group in group_by(evaluated, setup_key).values():
        plain = [run for run in group if run.method == WITHOUT_SPCL and not run.settings["method"]["alpha"]]
        stable = [run for name in OURS for run in group if run.method == name]
        if plain and stable:
            return plain[0], stable[0]
    raise MissingRunsError(f"no configuration was run both by {WITHOUT_SPCL} and by {' or '.join(OURS)}")


# -- ablation

CONDITIONS: dict[str, dict[str, Any]] = {
    "none": {"color": BLACK, "linestyle": (0, (1.2, 1.2)), "marker": "v"},
    "gradients": {"color": BLUE, "linestyle": (0, (5, 1.5)), "marker": "s"},
    "filters": {"color": GREEN, "linestyle": (0, (5, 1.5, 1.2, 1.5)), "marker": "^"},
    "both": {"color": VERMILLION, "linestyle": "-", "marker": "o"},
}


@figure(
    "ablation",
    number="Figure 3",
    title="Ablation",
    caption="Ablation study with two tasks, the second starting at the dashed line and the first ending at the dotted "
    "one: accuracy over time with orthogonal gradients (SORO), orthogonal filters (DBT), both, or none.",
    needs="runs of two tasks by er and by soro, each with α = 0 and with one other α, evaluated along the way",
    grids=(GridCommand("toy-cifar10", "er,soro", assignments=("evaluate_every=10",), sweeps=("method.alpha=0,1e-5",)),),
)
def ablation(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the accuracy of the two tasks over time, in a panel each, with a line for each condition."""
    runs = complete_runs(records)
    by_condition, alpha = _runs_by_condition(evaluated_over_time(two_task_runs(runs)))
    curves = {name: [RunCurves(run) for run in group] for name, group in by_condition.items()}
    first = curves["both"][0]
    figure = new_figure(WIDTH, 3.1)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for number, (axes, task) in enumerate(zip(panels, first.tasks, strict=True)):
        for name, line_style in CONDITIONS.items():
            steps, values = mean_curve([curve.accuracy(task) for curve in curves[name]])
            axes.plot(steps, values, label=name, markersize=3, markevery=max(1, len(steps) // 12), **line_style)
        mark_task_changes(axes, first.timeline)
        panel_title(axes, number, f"Task {number + 1}")
        axes.set_xlabel("step")
    panels[0].set_ylabel("accuracy (%)")
    legend_below(figure, 4, "orthogonal")
    run = first.run
    return figure, (
        f"{run.benchmark}, {run.scenario}-incremental, configuration {run.config}, α = {alpha:g}, "
        f"mean of {format_count(map(len, curves.values()), 'run')} a line."
    )


def condition(run: RunRecord) -> str | None:
    """Return the condition that a run belongs to, if any.

    >>> from pathlib import Path
    >>> condition(RunRecord(Path(), {"method": {"name": "er", "alpha": 0.001}}, None))
    'filters'
    """
    gradients, filters = run.method in ("soro", "soro+dbt"), _alpha(run) > 0
    if not gradients and run.method != "er":
        return None
    return {(0, 0): "none", (1, 0): "gradients", (0, 1): "filters", (1, 1): "both"}[gradients, filters]


def _runs_by_condition(runs: Sequence[CompleteRun]) -> tuple[dict[str, list[CompleteRun]], float]:
    """Return the runs by condition, of the first configuration that has all four for one α, and that α."""
    found: set[str] = set()
    for group in group_by(runs, lambda run: setup_key(run, "seed")).values():
        for alpha in sorted({_alpha(run) for run in group} - {0.0}):
            by_condition = group_by([run for run in group if _alpha(run) in (0.0, alpha)], condition)
            present = {name: by_condition[name] for name in CONDITIONS if name in by_condition}
            if len(present) == len(CONDITIONS):
                return present, alpha
        found |= {name for run in group if (name := condition(run)) is not None}
    seen = ", ".join(name for name in CONDITIONS if name in found) or "nothing"
    raise MissingRunsError(f"no configuration has all of {', '.join(CONDITIONS)} with one α (found {seen})")


def _alpha(run: RunRecord) -> float:
    return float(run.settings["method"]["alpha"])


# -- toy timelines

MOST_TIMELINES = 4


@figure(
    "toy-timelines",
    number="Figures 9, 10 and 11",
    title="Toy experiment under different timelines",
    caption="Condition number, gradient conflicts and gradient magnitude similarity of the original gradient matrix G "
    "and the adjusted one Ĝ under different timelines: the second task joins at the dashed line, the first ends at "
    "the dotted one.",
    needs="runs of two tasks by soro or soro+dbt, with several timelines",
    grids=(GridCommand("toy-cifar10", "soro+dbt", configs="0-2", seeds="0", sweeps=("overlap=1,0.5",)),),
)
def toy_timelines(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the three measures of G and Ĝ, in a column for each timeline."""
    runs = complete_runs(records)
    chosen = [RunCurves(run) for run in _one_run_per_timeline(runs)]
    figure = new_figure(WIDTH, 5.4)
    panels = figure.subplots(3, len(chosen), sharex="col", sharey="row", squeeze=False)
    for column, curves in enumerate(chosen):
        for row, measure in enumerate(MEASURES):
            axes = panels[row, column]
            axes.plot(*curves.stability(measure, "before"), color=BLUE, linewidth=0.9, label="original G")
            axes.plot(*curves.stability(measure, "after"), color=VERMILLION, linewidth=1.6, label="adjusted Ĝ")
            measure_axis(axes, measure)
            axes.set_ylabel(MEASURES[measure])
            axes.label_outer()
            axes.set_xlim(left=0)
            mark_task_changes(axes, curves.timeline)
        (_, end), (join, last) = curves.timeline
        panel_title(panels[0, column], column, f"joins at {join},\nends at {end} and {last}")
        panels[2, column].set_xlabel("step")
    legend_below(figure, 2)
    run = chosen[0].run
    return figure, f"{run.benchmark}, {run.scenario}-incremental, {display_name(run.method)}, seed {run.seed}."


def _one_run_per_timeline(runs: Sequence[CompleteRun]) -> list[CompleteRun]:
    """Return runs of one method that differ only in their timeline."""
    by_method = group_by(two_task_runs(runs), lambda run: run.method)
    candidates = next((by_method[name] for name in OURS if name in by_method), [])
    if not candidates:
        raise MissingRunsError("there is none by " + " or ".join(OURS))
    groups = group_by(candidates, lambda run: settings_key(run, "config", "protocol_seed", "overlap", "gap"))
    largest = max(groups.values(), key=len)
    by_timeline = group_by(largest, lambda run: run.result.timeline)
    return [group[0] for group in by_timeline.values()][:MOST_TIMELINES]
