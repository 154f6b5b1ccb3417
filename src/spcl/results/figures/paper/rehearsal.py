"""Figure 8: accuracy against the size of the rehearsal memory."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from spcl.results.figures.comparable import setup_key
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import WIDTH, line_styles
from spcl.results.figures.sweeps import SweepLine, draw_points, runs_note, sweep_lines
from spcl.results.grid_command import GridCommand
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name, method_order

__all__ = ["FIGURE"]


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
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
    figure = Figure(figsize=(0.6 * WIDTH, 2.8), layout="constrained")
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


BUDGETS = "memory_budget=500,1000,2000,3000,4000,5000"

FIGURE = FigureSpec(
    name="rehearsal",
    number="Figure 8",
    title="Rehearsal size",
    caption="Accuracy against the size of the rehearsal memory.",
    needs="runs that differ only in memory_budget",
    grids=(GridCommand("ps-cifar100", "soro,soro+dbt", preset="paper", sweeps=(BUDGETS,)),),
    draw=draw,
)
