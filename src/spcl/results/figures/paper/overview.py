"""Tables 1 and 2 at a glance: the accuracy of every method beside the paper's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spcl.results.figures.curves import Array
from spcl.results.figures.panels import legend_below
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import BLACK, BLUE, GREEN, PURPLE, VERMILLION, WIDTH
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.build import make_tables
from spcl.results.tables.methods import display_name, method_order
from spcl.results.tables.paper import PaperResult
from spcl.results.tables.paper_problem import is_papers_problem
from spcl.results.tables.partial_data import data_share
from spcl.results.tables.table import Measure

__all__ = ["FIGURE"]

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
    paper: PaperResult | None


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw a row for each method and a column for each benchmark and scenario: our accuracy beside the paper's."""
    usable = [run for run in records if is_papers_problem(run) and run.preset in PRESETS]
    points, remarks = _points(usable)
    columns = group_by(points, lambda point: (point.scenario, point.benchmark))
    order = [(scenario, name) for scenario in SCENARIOS for name in BENCHMARKS if (scenario, name) in columns]
    if not order:
        raise MissingRunsError("none of them is complete and of the paper's problem")
    methods = sorted({point.method for point in points}, key=method_order)
    figure = Figure(figsize=(WIDTH, 1.4 + ROW_HEIGHT * len(methods)), layout="constrained")
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


FIGURE = FigureSpec(
    name="overview",
    number="Tables 1 and 2",
    title="All methods beside the paper's numbers",
    caption="Final accuracy of every method on every benchmark, in both scenarios, beside the paper's.",
    needs="complete runs of the paper's benchmarks",
    grids=tuple(
        GridCommand(name, "all", scenarios="task,class", configs="0-8", preset="released") for name in BENCHMARKS
    ),
    draw=draw,
)
