"""The hyper-parameters α, σ and λ."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spcl.results.figures.comparable import identity
from spcl.results.figures.drawing import FigureSpec, MissingRunsError
from spcl.results.figures.panels import letter
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import BLACK, VERMILLION, WIDTH, display
from spcl.results.figures.sweeps import SweepLine, mean_accuracy, sweep_lines
from spcl.results.records import RunRecord

__all__ = ["HYPERPARAMETERS"]

SYMBOLS = {"method.alpha": "α", "method.sigma": "σ", "method.lambda_": "λ"}


def draw_hyperparameters(runs: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Accuracy against each hyper-parameter, the others as they are by default."""
    ours = [run for run in runs if run.method in ("soro", "soro+dbt")]
    full = [run for run in ours if run.settings["method"]["iterations"] > 0]
    lines = {name: found[0] for name in SYMBOLS if (found := sweep_lines(full, name))}
    if not lines:
        raise MissingRunsError(f"none of {len(ours)} runs by soro and soro+dbt differ in just one of them")
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    panels = figure.subplots(1, len(lines), squeeze=False, sharey=True)[0]
    limits = []
    for number, (axes, (name, line)) in enumerate(zip(panels, lines.items(), strict=True)):
        values, means, deviations = line.points()
        axes.errorbar(values, means, deviations, color=VERMILLION, marker="o", capsize=2.5, label="accuracy")
        _logarithmic(axes, values)
        axes.set_xlabel(SYMBOLS[name])
        letter(axes, number, f"{SYMBOLS[name]} ({name.removeprefix('method.').rstrip('_')})")
        limits.append(_draw_limit(axes, line, ours))
    panels[0].set_ylabel("accuracy (%)")
    panels[0].legend()
    run = lines[next(iter(lines))].first
    return figure, (
        f"{run.benchmark}, {run.scenario}-incremental, {display(run.method)}; mean and standard deviation over seeds."
        f"{' Dashed: strict orthogonality, ĜᵀĜ = I.' if any(limits) else ''}"
    )


def _draw_limit(axes: Axes, line: SweepLine, runs: Sequence[RunRecord]) -> bool:
    """The accuracy of Ĝ = UVᵀ, where the descent of Algorithm 1 starts, if there are runs without any iteration."""
    varied = ("seed", "config", "method.iterations", *SYMBOLS)
    strict = [
        run
        for run in runs
        if run.settings["method"]["iterations"] == 0 and identity(run, *varied) == identity(line.first, *varied)
    ]
    if strict:
        axes.axhline(mean_accuracy(strict)[0], color=BLACK, linestyle="--", label="strict orthogonality")
    return bool(strict)


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis, with a place for 0 where it is among the values."""
    positive = [value for value in values if value > 0]
    if len(positive) == len(values):
        axes.set_xscale("log")
    elif positive:
        axes.set_xscale("symlog", linthresh=min(positive))


def _recipe(*sweeps: str) -> Recipe:
    return Recipe("ps-cifar100", "soro+dbt", sweeps=sweeps)


HYPERPARAMETERS = FigureSpec(
    name="hyperparameters",
    number="Figure 7",
    title="Hyper-parameters",
    caption="Choice of the hyper-parameters α (eq. 4), σ and λ (eq. 9).",
    needs="runs by soro or soro+dbt that differ only in α, σ or λ",
    recipes=(
        _recipe("method.alpha=0,1e-5,1e-4,1e-3,1e-2,1e-1"),
        _recipe("method.sigma=1,10,50,100,200,1000"),
        _recipe("method.lambda_=0,1,10,100,1000"),
        _recipe("method.iterations=0"),
    ),
    draw=draw_hyperparameters,
)
