"""The figures of the report, as images inside the page."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from spcl.errors import SpclError
from spcl.results.figures import FIGURES, FigureSpec, draw_figure
from spcl.results.records import RunRecord

__all__ = ["Picture", "draw_pictures"]


@dataclass(frozen=True)
class Picture:
    """A figure of the paper: its image as a data URL and caption, or the reason why there is none."""

    spec: FigureSpec
    caption: str = ""
    image: str = ""
    problem: str = ""


def draw_pictures(runs: Sequence[RunRecord]) -> list[Picture]:
    """Draw all figures."""
    return [_picture(spec, runs) for spec in FIGURES.values()]


def _picture(spec: FigureSpec, runs: Sequence[RunRecord]) -> Picture:
    try:
        drawing = draw_figure(spec, runs)
    except SpclError as error:
        return Picture(spec, problem=str(error))
    image = base64.b64encode(drawing.svg().encode()).decode()
    return Picture(spec, drawing.caption, f"data:image/svg+xml;base64,{image}")
