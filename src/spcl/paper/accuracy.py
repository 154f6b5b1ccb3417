"""The paper's figures of final accuracies: all methods beside its tables, paradigms, hyper-parameters and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spcl.paper.numbers import is_papers_problem
from spcl.results.figures.curves import (
    Array,
    SweepLine,
    draw_points,
    mean_accuracy,
    runs_note,
    settings_key,
    setup_key,
    sweep_lines,
)
from spcl.results.figures.drawing import (
    BLACK,
    BLUE,
    GREEN,
    PURPLE,
    VERMILLION,
    WIDTH,
    GridCommand,
    MissingRunsError,
    draw_timeline_bars,
    figure,
    legend_below,
    line_styles,
    new_figure,
    panel_title,
)
from spcl.results.names import PublishedResult, display_name, method_order
from spcl.results.records import CompleteRun, RunRecord, complete_runs, group_by
from spcl.results.tables import make_tables
from spcl.results.tables.build import Measure, data_share
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
