"""Figures drawn from runs, with captions, and their files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from matplotlib.figure import Figure

import spcl
from spcl.errors import SpclError
from spcl.files import atomic_write, user_errors
from spcl.results.duplicates import check_duplicates
from spcl.results.figures.comparable import NOT_SHOWN
from spcl.results.figures.spec import FigureSpec, MissingRunsError
from spcl.results.figures.style import figure_style
from spcl.results.records import RunRecord

__all__ = ["Drawing", "check_format", "draw_figure", "figure_paths", "save_drawing", "write_figure"]

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
