"""What figures are made of: their registry, style, panels and files. Matplotlib is imported when one is drawn."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spcl
from spcl._util.files import atomic_write, user_errors
from spcl._util.registry import Registry
from spcl.errors import SpclError
from spcl.methods import METHODS
from spcl.results.compare import Measure
from spcl.results.figures.curves import NOT_SHOWN
from spcl.results.records import RunRecord, check_duplicates
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
        draw: function from runs, of which it draws the complete ones, to a figure and the end of its caption; raises
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
"""The methods of the paper, which often coincide: the second is drawn dashed, on top of the first."""

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
    """Return a figure of ``count`` panels in rows; ``options`` are those of Matplotlib's ``subplots``."""
    columns = min(most_columns, count)
    rows = -(-count // columns)
    size = (WIDTH if columns > 1 else 0.7 * WIDTH, rows * row_height + extra_height)
    figure = new_figure(*size)
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def measure_axis(axes: Axes, measure: Measure) -> None:
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
