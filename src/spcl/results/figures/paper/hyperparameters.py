"""Figure 7: accuracy against the hyper-parameters α, σ and λ."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spcl.results.figures.comparable import settings_key
from spcl.results.figures.panels import panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import BLACK, VERMILLION, WIDTH
from spcl.results.figures.sweeps import SweepLine, draw_points, mean_accuracy, runs_note, sweep_lines
from spcl.results.grid_command import GridCommand
from spcl.results.records import RunRecord, complete_runs
from spcl.results.tables.methods import display_name

__all__ = ["FIGURE"]

SYMBOLS = {"method.alpha": "α", "method.sigma": "σ", "method.lambda_": "λ"}


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw accuracy against each hyper-parameter, the others at their defaults."""
    candidates = [run for run in records if run.method in ("soro", "soro+dbt")]
    relaxed = [run for run in candidates if run.settings["method"]["iterations"] > 0]
    lines = {name: found[0] for name in SYMBOLS if (found := sweep_lines(relaxed, name))}
    if not lines:
        count = len(complete_runs(candidates))
        raise MissingRunsError(f"none of {count} complete runs by soro and soro+dbt differ in just one of them")
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
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


SWEEPS = (
    "method.alpha=0,1e-6,1e-5,1e-4,1e-3,1e-2,1e-1",
    "method.sigma=1,10,50,100,200,1000",
    "method.lambda_=0,1,10,100,1000",
    "method.iterations=0",
)

FIGURE = FigureSpec(
    name="hyperparameters",
    number="Figure 7",
    title="Hyper-parameters",
    caption="Choice of the hyper-parameters α (eq. 4), σ and λ (eq. 9).",
    needs="runs by soro or soro+dbt that differ only in α, σ or λ",
    grids=tuple(GridCommand("ps-cifar100", "soro+dbt", preset="paper", sweeps=(sweep,)) for sweep in SWEEPS),
    draw=draw,
)
