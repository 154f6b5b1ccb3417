"""Beyond Figure 7: how much accuracy depends on the settings of each method."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from spcl.errors import SpclError
from spcl.methods import make_method
from spcl.results.figures.panels import panel_title
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import WIDTH, numbered_line_styles
from spcl.results.figures.sweeps import SweepLine, draw_points, runs_note, sweep_lines
from spcl.results.grid_command import GridCommand
from spcl.results.grouping import group_by
from spcl.results.records import RunRecord
from spcl.results.tables.methods import display_name

__all__ = ["FIGURE"]

Lines = Mapping[str, tuple[float, SweepLine]]
"""By label, the default of a setting and the runs over its values."""


def draw(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw accuracy against every swept setting of every method, as a multiple of its default."""
    panels = {scenario: lines for scenario, runs in _scenarios(records).items() if (lines := _lines(runs))}
    if not panels:
        raise MissingRunsError("no runs of a method differ in just one of its settings whose default is above 0")
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    styles = dict(zip(labels, numbered_line_styles(len(labels)), strict=True))
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    for number, (axes, (scenario, lines)) in enumerate(
        zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True)
    ):
        for label, (default, line) in lines.items():
            points = {value / default: point for value, point in line.points().items() if value > 0.0}
            draw_points(axes, points, label=label, **styles[label].marked_line())
        axes.axvline(1.0, color="0.8", linewidth=0.8, zorder=0)
        axes.set(xscale="log", xlabel="times the default", ylabel="accuracy (%)")
        panel_title(axes, number, f"{scenario}-incremental")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    shown = [run for lines in panels.values() for _, line in lines.values() for run in line.records]
    return figure, f"{', '.join(sorted({run.benchmark for run in shown}))}; {runs_note(shown)}"


def _scenarios(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    return group_by(sorted(records, key=lambda run: run.scenario, reverse=True), lambda run: run.scenario)


def _lines(records: Sequence[RunRecord]) -> Lines:
    """Return the largest sweep of every setting of every method, if its default is above 0."""
    return {
        f"{display_name(method)}, {name.rstrip('_')}": (default, found[0])
        for method, runs in group_by(records, lambda run: run.method).items()
        for name, default in _defaults(method).items()
        if (found := sweep_lines(runs, f"method.{name}"))
    }


def _defaults(method: str) -> dict[str, float]:
    """Return the numbers above 0 among the default settings of a method; none for one that is not known here."""
    try:
        settings = make_method(method).settings.model_dump()
    except SpclError:
        return {}
    return {name: value for name, value in settings.items() if type(value) in (int, float) and value > 0.0}


SWEEPS = {
    "spcl": ("method.kappa=1,2,6,20", "method.logit_weight=0.02,0.06,0.2,0.6,2"),
    "soro": ("method.sigma=10,30,100,300,1000", "method.lambda_=10,30,100,300,1000"),
    "der++": ("method.logit_weight=0.01,0.03,0.1,0.3,1", "method.label_weight=0.05,0.15,0.5,1.5,5"),
}

FIGURE = FigureSpec(
    name="sensitivity",
    number="Beyond Figure 7",
    title="How much settings matter",
    caption="Final accuracy against the settings of each method, as multiples of their defaults.",
    needs="runs of methods that differ only in one of their settings",
    grids=tuple(
        GridCommand("ps-emnist", method, scenarios="task,class", configs="0,4,8", sweeps=(sweep,))
        for method, sweeps in SWEEPS.items()
        for sweep in sweeps
    ),
    draw=draw,
)
