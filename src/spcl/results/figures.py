"""Figures of runs, drawn with Matplotlib, which is imported when one is drawn.

First what all figures are made of: their registry, style, panels and files; then what they draw: comparable runs,
curves over training, and accuracies over a setting; then the figures of our own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, update_wrapper
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

import spcl
from spcl._util.files import atomic_write, user_errors
from spcl._util.registry import Registry
from spcl.data import Protocol
from spcl.errors import SpclError
from spcl.methods import METHODS, make_method
from spcl.results.compare import Measure as StabilityMeasure
from spcl.results.names import display_name, format_count, format_ranges, method_order
from spcl.results.records import (
    IDENTITY,
    CompleteRun,
    RunRecord,
    check_duplicates,
    complete_runs,
    group_by,
)
from spcl.results.tables import Measure, expected_runs, mean_values, measure
from spcl.runs.settings import decisive_settings, flat_settings
from spcl.streams import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- the figures there are


@dataclass(frozen=True)
class GridCommand:
    """The options of one call of ``spcl grid``.

    >>> GridCommand("toy-cifar10", "er,soro", seeds="0", assignments=("evaluate_every=10",)).text("results/toy")
    'spcl grid --benchmark toy-cifar10 --methods er,soro --scenarios task --configs 0 --seeds 0 --preset default
        --set evaluate_every=10 --out results/toy'
    """

    benchmark: str
    methods: str
    scenarios: str = "task"
    configs: str = "0"
    seeds: str = "0-2"
    preset: str = "default"
    assignments: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()

    def text(self, out: str) -> str:
        """Return the command that makes the runs in the folder ``out``."""
        words = ["spcl", "grid"]
        for name in ("benchmark", "methods", "scenarios", "configs", "seeds", "preset"):
            words += [f"--{name}", getattr(self, name)]
        words += [word for text in self.sweeps for word in ("--sweep", text)]
        words += [word for text in self.assignments for word in ("--set", text)]
        return shlex.join([*words, "--out", out])


class MissingRunsError(SpclError):
    """Error for runs that do not suffice for a figure."""


Draw = Callable[[Sequence[RunRecord]], "tuple[Figure, str]"]


@dataclass(eq=False)
class FigureSpec:
    """A figure by name.

    Attributes:
        name: its name for ``spcl figure``.
        number: its number in the paper.
        title: its subject, in a few words.
        caption: its description, in a sentence or two.
        needs: the runs it is drawn from.
        grids: commands that make such runs.
        draw: function from runs to a figure and the end of its caption. It draws the complete runs, and raises a
            `MissingRunsError` that says what is missing.
    """

    name: str
    number: str
    title: str
    caption: str
    needs: str
    grids: tuple[GridCommand, ...]
    draw: Draw

    def __post_init__(self) -> None:
        update_wrapper(self, self.draw)

    def __call__(self, runs: Sequence[RunRecord]) -> tuple[Figure, str]:
        """Draw the figure."""
        return self.draw(runs)

    def commands(self) -> list[str]:
        """Return the commands that make runs for this figure."""
        return [grid.text(f"results/{self.name}") for grid in self.grids]


FIGURES: Registry[FigureSpec] = Registry("figure", module="spcl.paper.figures")
"""Every figure, by name."""


def figure(
    name: str, *, number: str, title: str, caption: str, needs: str, grids: tuple[GridCommand, ...] = ()
) -> Callable[[Draw], FigureSpec]:
    """Return a decorator that adds a figure: a function from runs to a Matplotlib figure and the end of its caption."""

    def add(draw: Draw) -> FigureSpec:
        return FIGURES.register(name)(FigureSpec(name, number, title, caption, needs, grids, draw))

    return add


def figure_spec(name: str) -> FigureSpec:
    """Return the figure of this name.

    >>> figure_spec("ablation").number
    'Figure 3'
    >>> figure_spec("ablaton")
    Traceback (most recent call last):
    ...
    spcl._util.registry.UnknownNameError: there is no figure 'ablaton'; did you mean 'ablation'?
    """
    return FIGURES[name]


def all_figures() -> list[FigureSpec]:
    """Return every figure, in the order of their numbers in the paper, and then those without one."""
    return sorted(FIGURES.values(), key=_position)


def _position(spec: FigureSpec) -> tuple[float, bool]:
    """Return the first number, and whether the figure goes beyond it: Section 5.1 stands between Figures 5 and 6."""
    numbers = re.findall(r"[\d.]+", spec.number)
    return float(numbers[0]) if numbers else float("inf"), spec.number.startswith("Beyond")


# -- style

WIDTH = 7.0
"""The width of a page of text, in inches."""

VERMILLION, BLUE, GREEN, PURPLE, ORANGE, SKY, BLACK = (
    "#D55E00",
    "#0072B2",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
COLOURS = (VERMILLION, BLUE, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""Okabe and Ito's palette for all kinds of colour vision, without its yellow, which is too faint on paper."""

DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
OURS = ("soro+dbt", "soro")
"""The paper's methods in order of preference; they often coincide: the second is drawn dashed, on top of the first."""

STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 8.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "figure.dpi": 200,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "grid.alpha": 0.6,
    "grid.color": "#d0d0d0",
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "spcl",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the Matplotlib settings of all figures to what is drawn and saved in this block."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        yield


@dataclass(frozen=True)
class LineStyle:
    """Colour, dashes, marker, width and drawing order of a line."""

    colour: str
    dashes: Any
    marker: str
    width: float
    zorder: int

    def line(self) -> dict[str, Any]:
        """Return Matplotlib's arguments for a line without markers, for curves of many points."""
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": self.width, "zorder": self.zorder}

    def marked_line(self) -> dict[str, Any]:
        """Return Matplotlib's arguments for a line with markers, for curves of few points."""
        return self.line() | {"marker": self.marker}


def line_styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """Return a line style for each label; a method has the same one in every figure, and ours a colour of their own.

    >>> line_styles(["er", "soro"])["soro"] == line_styles(["soro", "soro (sigma=10)"])["soro"]
    True
    """
    wanted = list(dict.fromkeys(labels))
    known = [*OURS, *(name for name in METHODS if name not in OURS)]
    order = [*known, *(label for label in wanted if label not in known)]
    return {label: _line_style(order.index(label)) for label in wanted}


def numbered_line_styles(count: int) -> list[LineStyle]:
    """Return different line styles for lines that do not stand for methods."""
    parts = zip(range(count), cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False)
    return [LineStyle(colour, dashes, marker, width=1.5, zorder=3) for _, colour, dashes, marker in parts]


def _line_style(index: int) -> LineStyle:
    marker = MARKERS[index % len(MARKERS)]
    if index < len(OURS):
        return LineStyle(COLOURS[index], DASHES[index], marker, width=2.0, zorder=4 + index)
    colours = COLOURS[len(OURS) :]
    dashes, colour = divmod(index - len(OURS), len(colours))
    return LineStyle(colours[colour], DASHES[dashes % len(DASHES)], marker, width=1.2, zorder=3)


# -- panels


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


GREY = "0.5"


def panel_title(axes: Axes, number: int, title: str) -> None:
    """Set the title of a panel, with its letter.

    >>> axes = new_figure(1, 1).subplots()
    >>> panel_title(axes, 1, "Accuracy")
    >>> axes.get_title("left")
    '(b) Accuracy'
    """
    axes.set_title(f"({chr(ord('a') + number)}) {title}", loc="left")


def panel_grid(
    count: int, most_columns: int, row_height: float, extra_height: float = 0.0, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels in rows; ``options`` go to Matplotlib's ``subplots``."""
    columns = min(most_columns, count)
    rows = -(-count // columns)
    size = (WIDTH if columns > 1 else 0.7 * WIDTH, rows * row_height + extra_height)
    figure = new_figure(*size)
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def measure_axis(axes: Axes, measure: StabilityMeasure) -> None:
    """Set up the vertical axis for a measure of stability: logarithmic for κ, zero marked for the cosine."""
    if measure == "condition_number":
        log_scale(axes)
    elif measure == "cosine":
        axes.axhline(0.0, color=GREY, linewidth=0.7, zorder=1)


def log_scale(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def mark_task_changes(axes: Axes, timeline: Sequence[tuple[int, int]]) -> None:
    """Draw a dashed line where the second task joins, and a dotted one where the first ends."""
    axes.axvline(timeline[1][0], color=GREY, linestyle="--", linewidth=1.0)
    axes.axvline(timeline[0][1], color=GREY, linestyle=":", linewidth=1.0)


def legend_below(figure: Figure, columns: int, title: str | None = None) -> None:
    """Add one legend for all panels, each label once."""
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, title=title)


def draw_timeline_bars(axes: Axes, timeline: Timeline) -> None:
    """Draw a bar for the time of each task, and a hatched one for the memory, which starts when a task has ended."""
    for task, (first, last) in enumerate(timeline.spans):
        axes.barh(task, last + 1 - first, left=first, height=0.72, color=COLOURS[task % len(COLOURS)])
    memory = len(timeline.spans)
    if rest := timeline.steps - timeline.memory_start:
        hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": GREY, "hatch": "////"}
        axes.barh(memory, rest, left=timeline.memory_start, height=0.72, **hatched)
    axes.set_yticks(range(memory + 1), [*(f"task {task}" for task in range(1, memory + 1)), "memory"])
    axes.set_ylim(memory + 0.6, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


# -- drawing figures, and their files


FORMATS = (".png", ".svg", ".pdf")
FOLDER_FORMATS = (".png", ".svg")
"""The formats of the files that are written to a folder."""

Metadata = Mapping[str, str | None]


@dataclass(frozen=True)
class Drawing:
    """A figure drawn from runs, and its full caption."""

    spec: FigureSpec
    figure: Figure
    caption: str

    @property
    def omits_runs(self) -> bool:
        """Whether the caption names runs that are not shown because their settings differ."""
        return NOT_SHOWN in self.caption

    def svg(self) -> str:
        """Return the figure as the text of an SVG file."""
        text = StringIO()
        with figure_style():
            self.figure.savefig(text, format="svg", metadata=_metadata(self, ".svg"))
        return text.getvalue()


def draw_figure(spec: FigureSpec, runs: Sequence[RunRecord]) -> Drawing:
    """Draw a figure from the complete ones of the runs, task-incremental ones first.

    Raises `MissingRunsError` with the commands that make runs for it where these do not suffice.
    """
    check_duplicates(runs)
    task_first = sorted(runs, key=lambda run: run.scenario != "task")
    try:
        with figure_style():
            figure, details = spec.draw(task_first)
    except MissingRunsError as error:
        commands = "\n".join(f"  {command}" for command in spec.commands())
        raise MissingRunsError(
            f"figure {spec.name!r} needs {spec.needs}, but {error}; this makes them:\n{commands}"
        ) from error
    return Drawing(spec, figure, f"{spec.number}. {spec.caption} {details}".strip())


def save_drawing(drawing: Drawing, out: str | Path) -> list[Path]:
    """Write the figure, with its caption as metadata, to a .png, .svg or .pdf file, or as PNG and SVG to a folder."""
    paths = figure_paths(drawing.spec, out)
    for path in paths:
        write_figure(drawing.figure, path, _metadata(drawing, path.suffix))
    return paths


def figure_paths(spec: FigureSpec, out: str | Path) -> list[Path]:
    """Return the files that a figure is written to."""
    out = Path(out)
    if not out.suffix or out.is_dir():
        return [out / f"{spec.name}{suffix}" for suffix in FOLDER_FORMATS]
    check_format(out)
    return [out]


def check_format(path: Path) -> None:
    """Raise an error if the suffix is none of the formats of figures."""
    if path.suffix.lower() not in FORMATS:
        *first, last = FORMATS
        raise SpclError(
            f"figures are written as {', '.join(first)} or {last}, not as {path.name!r}; use such a suffix or a folder"
        )


def write_figure(figure: Figure, path: Path, metadata: Metadata | None = None) -> None:
    """Write a figure atomically, in the format of the path's suffix; missing folders are made."""
    with user_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with figure_style(), atomic_write(path) as file:
            figure.savefig(file, format=path.suffix.removeprefix(".").lower(), metadata=metadata)


def _metadata(drawing: Drawing, suffix: str) -> Metadata:
    title, caption, program = drawing.spec.title, drawing.caption, f"spcl {spcl.__version__}"
    match suffix.lower():
        case ".png":
            return {"Title": title, "Description": caption, "Software": program}
        case ".svg":
            return {"Title": title, "Description": caption, "Creator": program, "Date": None}
        case _:
            return {"Title": title, "Subject": caption, "Creator": program, "CreationDate": None}


# -- comparable runs: those that differ only in what a figure compares


MOST_NAMED = 4
NOT_SHOWN = "Not shown, as their settings differ"

Key = tuple[tuple[str, str], ...]


def settings_key(run: RunRecord, *ignored: str) -> Key:
    """Return all settings that decide a run, apart from those ignored.

    >>> from pathlib import Path
    >>> settings_key(RunRecord(Path(), {"seed": 0, "gap": 1, "method": {"name": "er"}}, None), "seed")
    (('gap', '1'), ('method.name', "'er'"))
    """
    decisive = decisive_settings(run.settings)
    return tuple((name, repr(value)) for name, value in sorted(decisive.items()) if name not in ignored)


def setup_key(run: RunRecord, *ignored: str) -> Key:
    """Return the settings that decide a run, apart from its method and those ignored."""
    return tuple((name, value) for name, value in settings_key(run, *ignored) if not name.startswith("method."))


def comparable_runs(runs: Sequence[CompleteRun], *ignored: str) -> dict[str, list[CompleteRun]]:
    """Return runs with the same setup, by method in the order of the paper's tables.

    The setup is that in which most methods were run; of several variants of a method, the one with most runs is taken.
    The ignored settings may differ.
    """
    setups = group_by(runs, lambda run: setup_key(run, *ignored)).values()
    largest = max(setups, key=lambda group: (len({run.recipe for run in group}), len(group)), default=[])
    methods = group_by(sorted(largest, key=lambda run: method_order(run.recipe)), lambda run: run.recipe)
    variants = {method: group_by(group, lambda run: settings_key(run, *ignored)) for method, group in methods.items()}
    return {method: max(groups.values(), key=len) for method, groups in variants.items()}


def not_shown_note(runs: Sequence[CompleteRun], shown: Iterable[Mapping[str, Sequence[CompleteRun]]]) -> str:
    """Return the sentence of a caption that names the runs which are not shown; empty if there are none."""
    chosen = {run.path: run for groups in shown for group in groups.values() for run in group}
    others = sorted({_difference(run, chosen.values()) for run in runs if run.path not in chosen})
    if not others:
        return ""
    named = ", ".join([*others[:MOST_NAMED], *([f"{len(others) - MOST_NAMED} more"] if others[MOST_NAMED:] else [])])
    return f" {NOT_SHOWN}: {named}."


def _difference(run: CompleteRun, shown: Iterable[CompleteRun]) -> str:
    """Return the method of a run with the settings that tell it from those shown beside it, and its scenario."""
    beside = [other for other in shown if (other.benchmark, other.scenario) == (run.benchmark, run.scenario)]
    nearest = max(beside, key=lambda other: other.recipe == run.recipe)
    known = decisive_settings(nearest.settings)
    own = {name: value for name, value in decisive_settings(run.settings).items() if name not in IDENTITY}
    variant = {name: value for name, value in own.items() if known.get(name, value) != value}
    return f"{replace(run, variant=variant).label} {run.scenario}-incrementally"


# -- curves over training steps


Array = NDArray[np.float64]
Curve = tuple[Array, Array]
"""Steps, and a value at each."""


class RunCurves:
    """The metrics of one run over time, read when first used."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run

    @cached_property
    def _entries(self) -> dict[str, list[dict[str, Any]]]:
        return group_by(self.run.metrics(), lambda entry: str(entry["kind"]))

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, in the order in which they start."""
        return list(self._entries["start"][0]["tasks"])

    @property
    def timeline(self) -> list[tuple[int, int]]:
        """The first and last step of each task."""
        return [(first, last) for first, last in self._entries["start"][0]["timeline"]]

    def stability(self, measure: StabilityMeasure, when: Literal["before", "after"]) -> Curve:
        """Return a measure of the gradients, before or after adjustment, at the steps with two gradients or more.

        NaN where the measure is infinite or unknown.
        """
        entries = [entry for entry in self._entries.get("step", []) if entry[when] is not None]
        values = [entry[when][measure] for entry in entries]
        return _steps(entries), np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def infinite_share(self) -> float:
        """Return the share of steps in which κ of the adjusted gradients is infinite, for a gradient of weight 0."""
        values = self.stability("condition_number", "after")[1]
        return float(np.isnan(values).mean()) if len(values) else 0.0

    def accuracy(self, task: str) -> Curve:
        """Return the accuracy of a task, in per cent, at the steps where it was evaluated."""
        entries = [entry for entry in self._entries.get("evaluation", []) if task in entry["accuracy"]]
        return _steps(entries), np.array([entry["accuracy"][task] for entry in entries], dtype=np.float64)

    def accuracy_at_ends(self) -> Array:
        """Return the average accuracy of the tasks seen at every end of a task; two that end together count twice."""
        return np.array(
            [
                float(np.mean(list(entry["accuracy"].values())))
                for entry in self._entries.get("evaluation", [])
                for _ in entry["ended"]
            ]
        )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean at every step of the curves that have a finite value there.

    >>> a, b = (np.array([0.0, 1.0]), np.array([2.0, 4.0])), (np.array([1.0]), np.array([6.0]))
    >>> mean_curve([a, b])
    (array([0., 1.]), array([2., 5.]))
    """
    points = [(steps[np.isfinite(values)], values[np.isfinite(values)]) for steps, values in curves]
    steps = np.concatenate([steps for steps, _ in points])
    values = np.concatenate([values for _, values in points])
    unique, index = np.unique(steps, return_inverse=True)
    return unique, np.bincount(index, values) / np.bincount(index)


def block_medians(curve: Curve, count: int) -> Curve:
    """Return at most ``count`` points: the mean step and the median value of as many equal parts of the curve.

    >>> block_medians((np.arange(6.0), np.array([1.0, 9.0, 2.0, 5.0, 5.0, 8.0])), 2)
    (array([1., 4.]), array([2., 5.]))
    """
    steps, values = (part[np.isfinite(curve[1])] for part in curve)
    if len(steps) <= count:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), count)
    return np.array([steps[part].mean() for part in parts]), np.array([np.median(values[part]) for part in parts])


def _steps(entries: Sequence[dict[str, Any]]) -> Array:
    return np.array([entry["step"] for entry in entries], dtype=np.float64)


# -- accuracies of runs that differ in one setting


@dataclass(frozen=True)
class SweepLine:
    """The runs for each value of one setting, complete or not, all other settings equal."""

    runs: Mapping[float, Sequence[RunRecord]]

    @property
    def first(self) -> CompleteRun:
        """The first complete run of the smallest value that has one."""
        return next(run for runs in self.runs.values() for run in complete_runs(runs))

    @property
    def records(self) -> list[RunRecord]:
        """All runs."""
        return [run for runs in self.runs.values() for run in runs]

    def points(self) -> dict[float, Measure]:
        """Return the mean accuracy, with its standard deviation over seeds, for each value with complete runs."""
        return {
            value: mean_accuracy(complete) for value, runs in self.runs.items() if (complete := complete_runs(runs))
        }


def sweep_lines(records: Sequence[RunRecord], name: str) -> list[SweepLine]:
    """Return the groups of runs that differ only in this setting (and in seed and configuration), the largest first.

    Each group has complete runs for two values of the setting or more; values are in ascending order.
    """
    lines = []
    candidates = [run for run in records if _value(run, name) is not None]
    for group in group_by(candidates, lambda run: settings_key(run, name, "seed", "config")).values():
        by_value = group_by(group, lambda run: float(_value(run, name)))
        line = SweepLine({value: by_value[value] for value in sorted(by_value)})
        if len(line.points()) > 1:
            lines.append(line)
    return sorted(lines, key=lambda line: -len(line.points()))


def mean_accuracy(runs: Iterable[CompleteRun]) -> Measure:
    """Return the mean over seeds of the mean over configurations, and the standard deviation over seeds."""
    return measure(mean_values(runs, "accuracy"), "seeds")


def draw_points(axes: Axes, points: Mapping[float, Measure], **style: Any) -> None:
    """Draw means by their horizontal position, with bars of the standard deviation where there are several seeds."""
    means = [point.mean for point in points.values()]
    deviations = [np.nan if point.std is None else point.std for point in points.values()]
    bars = None if np.isnan(deviations).all() else deviations
    axes.errorbar(list(points), means, bars, capsize=2.5, **style)


def runs_note(records: Iterable[RunRecord]) -> str:
    """Return the part of a caption about the runs of all points of a figure: their seeds, and how many are missing.

    As in a table, every point is expected to have all configurations and seeds among these runs.
    """
    runs = list(records)
    points = group_by(runs, lambda run: settings_key(run, "seed", "config")).values()
    found = [{(run.config, run.seed) for run in complete_runs(group)} for group in points]
    seeds = [len({seed for _, seed in keys}) for keys in found if keys]
    missing = expected_runs(runs) * len(found) - sum(map(len, found))
    return f"{_seeds_note(seeds)}.{_missing_note(missing)}"


def _seeds_note(seeds: Sequence[int]) -> str:
    """Return what a point with these numbers of seeds shows.

    >>> _seeds_note([1, 1]), _seeds_note([3, 3])
    ('one seed', 'mean and standard deviation over 3 seeds')
    >>> _seeds_note([1, 3])
    'mean over 1 to 3 seeds, with the standard deviation where there are several'
    """
    if max(seeds) == 1:
        return "one seed"
    if min(seeds) == 1:
        return f"mean over {format_count(seeds, 'seed')}, with the standard deviation where there are several"
    return f"mean and standard deviation over {format_count(seeds, 'seed')}"


def _missing_note(missing: int) -> str:
    """Return the sentence about missing runs; empty if none are.

    >>> _missing_note(1)
    ' 1 run is missing.'
    """
    return f" {format_count([missing], 'run')} {'is' if missing == 1 else 'are'} missing." if missing else ""


def _value(run: RunRecord, name: str) -> Any:
    return flat_settings(run.settings).get(name)


# -- comparison of single runs


POINTS = 80


def comparison_figure(runs: Sequence[RunRecord]) -> Figure:
    """Draw complete runs: accuracy of the seen tasks whenever one ends, final accuracy of every task, κ after."""
    complete = complete_runs(runs)
    if not complete:
        raise SpclError(f"none of {len(runs)} runs is complete; finish the runs to compare them")
    from matplotlib.ticker import MaxNLocator

    with figure_style():
        drawn = new_figure(WIDTH, 5.2)
        panels = drawn.subplot_mosaic([["ends", "kappa"], ["tasks", "tasks"]])
        for number, (run, line_style) in enumerate(zip(complete, numbered_line_styles(len(complete)), strict=True), 1):
            curves = RunCurves(run)
            ends = curves.accuracy_at_ends()
            label = f"{number}: {display_name(run.label)}"
            panels["ends"].plot(np.arange(1, len(ends) + 1), ends, label=label, **line_style.marked_line())
            kappa = block_medians(curves.stability("condition_number", "after"), POINTS)
            panels["kappa"].plot(*kappa, **line_style.line())
        _draw_tasks(panels["tasks"], complete)
        panel_title(panels["ends"], 0, "Accuracy of seen tasks when one ends")
        panel_title(panels["kappa"], 1, "Condition number after adjustment")
        panel_title(panels["tasks"], 2, "Accuracy of every task at the end")
        panels["ends"].set(xlabel="tasks ended", ylabel="accuracy (%)")
        panels["ends"].xaxis.set_major_locator(MaxNLocator(integer=True))
        panels["kappa"].set_xlabel("step")
        measure_axis(panels["kappa"], "condition_number")
        legend_below(drawn, 3)
    return drawn


def _draw_tasks(axes: Axes, runs: Sequence[CompleteRun]) -> None:
    """Draw for every task a group of bars, one for each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.result.tasks))
    width = 0.8 / len(runs)
    for index, (run, line_style) in enumerate(zip(runs, numbered_line_styles(len(runs)), strict=True)):
        shift = (index - (len(runs) - 1) / 2) * width
        tasks = run.result.tasks
        heights = [tasks[name].final if name in tasks else 0.0 for name in names]
        axes.bar(np.arange(len(names)) + shift, heights, width=0.92 * width, color=line_style.colour)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("accuracy (%)")


def save_comparison(runs: Sequence[RunRecord], path: Path) -> None:
    """Draw complete runs into a file."""
    write_figure(comparison_figure(runs), path)


def comparison_path(out: Path) -> Path:
    """Return the file to draw a comparison into: ``compare.png`` in a folder, PNG where there is no suffix.

    >>> print(comparison_path(Path("runs")), comparison_path(Path("runs.svg")))
    runs.png runs.svg
    """
    if out.is_dir():
        return out / "compare.png"
    if not out.suffix:
        return out.with_name(f"{out.name}.png")
    check_format(out)
    return out


# -- timelines

MOST_TIMELINES = 9


@figure(
    "timeline",
    number="Section 5.1",
    title="Timelines",
    caption="Which task trains when; the memory (hatched) starts when the first task has ended.",
    needs="complete runs, or a protocol file",
    grids=(GridCommand("ps-glyphs", "soro", configs="0-8", seeds="0"),),
)
def timelines(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the timelines of the largest set of runs that differ only in method, configuration and seed."""
    runs = complete_runs(records)
    known = [run for run in runs if run.result.timeline]
    if not known:
        raise MissingRunsError(f"{len(runs)} complete runs hold no timeline" if runs else "there is none")
    comparable = max(group_by(known, lambda run: setup_key(run, "seed", "config")).values(), key=len)
    found = {
        f"configuration {format_ranges(sorted({run.config for run in group}))}": Timeline(spans)
        for spans, group in group_by(comparable, lambda run: run.result.timeline).items()
    }
    return _draw_timelines(found), f"{comparable[0].benchmark}."


def draw_protocol(protocol: Protocol) -> Drawing:
    """Draw the timelines of a protocol, whether or not they have been run."""
    configurations = {
        f"configuration {index}": protocol.configuration(index).timeline for index in range(len(protocol))
    }
    with figure_style():
        caption = f"{timelines.number}. {timelines.caption} {protocol.benchmark}."
        return Drawing(timelines, _draw_timelines(configurations), caption)


def _draw_timelines(timelines: Mapping[str, Timeline]) -> Figure:
    """Draw a panel for each of the first nine timelines."""
    shown = list(timelines.items())[:MOST_TIMELINES]
    bars = max(len(timeline.spans) for _, timeline in shown) + 1
    drawn, panels = panel_grid(len(shown), most_columns=3, row_height=0.7 + 0.17 * bars, sharex=True, sharey=True)
    for number, (axes, (title, timeline)) in enumerate(zip(panels, shown, strict=True)):
        draw_timeline_bars(axes, timeline)
        panel_title(axes, number, title)
    panels[0].set_xlim(0, max(timeline.steps for _, timeline in shown))
    drawn.supxlabel("step", fontsize=8.5)
    return drawn


# -- how much settings matter

Lines = Mapping[str, tuple[float, SweepLine]]
"""By label, the default of a setting and the runs over its values."""


SWEEPS = {
    "spcl": ("method.kappa=1,2,6,20", "method.logit_weight=0.02,0.06,0.2,0.6,2"),
    "soro": ("method.sigma=10,30,100,300,1000", "method.lambda_=10,30,100,300,1000"),
    "der++": ("method.logit_weight=0.01,0.03,0.1,0.3,1", "method.label_weight=0.05,0.15,0.5,1.5,5"),
}


@figure(
    "sensitivity",
    number="Beyond Figure 7",
    title="How much settings matter",
    caption="Final accuracy against the settings of each method, as multiples of their defaults.",
    needs="runs of methods that differ only in one of their settings",
    grids=tuple(
        GridCommand("ps-emnist", method, scenarios="task,class", configs="0,4,8", sweeps=(sweep,))
        for method, sweeps in SWEEPS.items()
        for sweep in sweeps
    ),
)
def sensitivity(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw accuracy against every swept setting of every method, as a multiple of its default."""
    scenarios = group_by(sorted(records, key=lambda run: run.scenario, reverse=True), lambda run: run.scenario)
    panels = {scenario: lines for scenario, runs in scenarios.items() if (lines := _lines(runs))}
    if not panels:
        raise MissingRunsError("no runs of a method differ in just one of its settings whose default is above 0")
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    styles = dict(zip(labels, numbered_line_styles(len(labels)), strict=True))
    drawn = new_figure(WIDTH, 3.2)
    for number, (axes, (scenario, lines)) in enumerate(
        zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True)
    ):
        for label, (default, line) in lines.items():
            points = {value / default: point for value, point in line.points().items() if value > 0.0}
            draw_points(axes, points, label=label, **styles[label].marked_line())
        axes.axvline(1.0, color="0.8", linewidth=0.8, zorder=0)
        axes.set(xscale="log", xlabel="times the default", ylabel="accuracy (%)")
        panel_title(axes, number, f"{scenario}-incremental")
    drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    shown = [run for lines in panels.values() for _, line in lines.values() for run in line.records]
    return drawn, f"{', '.join(sorted({run.benchmark for run in shown}))}; {runs_note(shown)}"


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
