"""The size of the rehearsal memory."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from spcl.results.figures.comparable import circumstances
from spcl.results.figures.drawing import FigureSpec, MissingRunsError
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import WIDTH, display, looks
from spcl.results.figures.sweeps import SweepLine, sweep_lines
from spcl.results.records import RunRecord
from spcl.results.tables.tables import method_order

__all__ = ["REHEARSAL"]


def draw_rehearsal(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Accuracy against the number of samples kept, a line for each method."""
    lines = sweep_lines(runs, "memory_budget")
    if not lines:
        raise MissingRunsError(f"none of {len(runs)} complete runs differ only in their memory budget")
    first = lines[0].first
    of_method: dict[str, SweepLine] = {}
    for line in lines:
        if _alike(line.first) == _alike(first):
            of_method.setdefault(line.first.method, line)
    figure = Figure(figsize=(0.6 * WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    look = looks(of_method)
    for method, line in sorted(of_method.items(), key=lambda item: method_order(item[0])):
        axes.errorbar(*line.points(), capsize=2.5, label=display(method), **look[method].points())
    axes.set_xlabel("samples in memory")
    axes.set_ylabel("accuracy (%)")
    axes.legend()
    return figure, f"{first.benchmark}, {first.scenario}-incremental; mean and standard deviation over seeds."


def _alike(run: RunRecord) -> object:
    return circumstances(run, "seed", "config", "memory_budget")


REHEARSAL = FigureSpec(
    name="rehearsal",
    number="Figure 8",
    title="ReplayBatch size",
    caption="Accuracy against the size of the rehearsal memory.",
    needs="runs that differ only in memory_budget",
    recipes=(Recipe("ps-cifar100", "soro,soro+dbt", sweeps=("memory_budget=500,1000,2000,3000,4000,5000",)),),
    draw=draw_rehearsal,
)
