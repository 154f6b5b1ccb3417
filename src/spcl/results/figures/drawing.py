"""What a figure of the paper is made of: its number, its caption, the runs it needs, and the drawing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from matplotlib.figure import Figure

import spcl
from spcl.errors import SpclError
from spcl.files import user_errors
from spcl.results.duplicates import check_duplicates
from spcl.results.figures.recipe import Recipe
from spcl.results.figures.style import style
from spcl.results.records import RunRecord

__all__ = ["Drawing", "FigureSpec", "MissingRunsError", "draw_figure", "figure_paths", "save_drawing"]

FORMATS = (".png", ".svg")


class MissingRunsError(SpclError):
    """The runs at hand do not suffice for a figure; the message says which command makes those it needs."""


@dataclass(frozen=True)
class FigureSpec:
    """A figure by name.

    Attributes:
        name: what ``spcl figure`` calls it.
        number: its number in the paper.
        title: what it shows, in a few words.
        caption: what it shows, in a sentence or two.
        needs: which runs it is drawn from.
        recipes: what makes such runs.
        draw: draws it and says what is drawn; raises `MissingRunsError` with what is missing.
    """

    name: str
    number: str
    title: str
    caption: str
    needs: str
    recipes: tuple[Recipe, ...]
    draw: Callable[[Sequence[RunRecord]], tuple[Figure, str]]

    def commands(self) -> list[str]:
        """What to type for such runs."""
        return [recipe.command(f"results/{self.name}") for recipe in self.recipes]


@dataclass(frozen=True)
class Drawing:
    """A figure drawn from runs, and its full caption."""

    spec: FigureSpec
    figure: Figure
    caption: str

    def svg(self) -> str:
        """The figure as the text of an SVG file."""
        text = StringIO()
        with style():
            self.figure.savefig(text, format="svg", metadata=_facts(self, ".svg"))
        return text.getvalue()


def draw_figure(spec: FigureSpec, runs: Sequence[RunRecord]) -> Drawing:
    """Draw a figure from those of the runs that are complete; task-incremental ones come first."""
    check_duplicates(runs)
    complete = sorted((run for run in runs if run.result is not None), key=lambda run: run.scenario != "task")
    try:
        with style():
            figure, details = spec.draw(complete)
    except MissingRunsError as error:
        commands = "\n".join(f"  {command}" for command in spec.commands())
        raise MissingRunsError(
            f"figure {spec.name!r} needs {spec.needs}, but {error}; this makes them:\n{commands}"
        ) from error
    return Drawing(spec, figure, f"{spec.number}. {spec.caption} {details}".strip())


def save_drawing(drawing: Drawing, out: Path) -> list[Path]:
    """Write the figure to a .png or .svg file, or both into a folder; its caption goes with it as metadata."""
    paths = figure_paths(drawing.spec, out)
    with user_errors(out):
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            _save(drawing, path)
    return paths


def figure_paths(spec: FigureSpec, out: Path) -> list[Path]:
    """The files that a figure is written to."""
    if not out.suffix or out.is_dir():
        return [out / f"{spec.name}{suffix}" for suffix in FORMATS]
    if out.suffix.lower() not in FORMATS:
        raise SpclError(f"figures are written as {' or '.join(FORMATS)}, not as {out.name!r}; or name a folder")
    return [out]


def _save(drawing: Drawing, path: Path) -> None:
    with style():
        drawing.figure.savefig(path, metadata=_facts(drawing, path.suffix))


def _facts(drawing: Drawing, suffix: str) -> dict[str, str | None]:
    facts: dict[str, str | None] = {"Title": drawing.spec.title, "Description": drawing.caption}
    program = f"spcl {spcl.__version__}"
    return facts | ({"Software": program} if suffix.lower() == ".png" else {"Creator": program, "Date": None})
