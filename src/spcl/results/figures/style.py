"""Colours, line styles and Matplotlib settings of all figures: readable in print, in grey and for the colour-blind."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib

from spcl.methods import METHODS

__all__ = [
    "BLACK",
    "BLUE",
    "COLOURS",
    "GREEN",
    "PURPLE",
    "VERMILLION",
    "WIDTH",
    "LineStyle",
    "figure_style",
    "line_styles",
    "numbered_line_styles",
]

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
    with matplotlib.rc_context(STYLE):
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
    """Return a line style for each label; a method has the same one in every figure.

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
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    if index < len(OURS):
        return LineStyle(colour, DASHES[index], marker, width=2.0, zorder=4 + index)
    return LineStyle(colour, DASHES[index // len(COLOURS) % len(DASHES)], marker, width=1.2, zorder=3)
