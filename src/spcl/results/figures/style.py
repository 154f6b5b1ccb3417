"""The one look of all figures: readable in print, in grey and for the colour-blind."""

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
    "VERMILLION",
    "WIDTH",
    "Look",
    "display",
    "distinct_looks",
    "looks",
    "style",
]

WIDTH = 7.0
"""Inches across a page of text."""

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
"""Okabe and Ito's palette, which all kinds of colour vision tell apart; less its yellow, too faint on paper."""

LINES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
OURS = ("soro+dbt", "soro")
"""They often coincide: the second is drawn dashed, on top of the first."""

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
def style() -> Iterator[None]:
    """Everything drawn and saved in this block has the one look."""
    with matplotlib.rc_context(STYLE):
        yield


@dataclass(frozen=True)
class Look:
    """How one line is told from the others: by colour, line and marker."""

    colour: str
    line: Any
    marker: str
    width: float
    height: int

    def curve(self) -> dict[str, Any]:
        """For a curve of many points."""
        return {"color": self.colour, "linestyle": self.line, "linewidth": self.width, "zorder": self.height}

    def points(self) -> dict[str, Any]:
        """For a curve of few points."""
        return self.curve() | {"marker": self.marker}


def display(label: str) -> str:
    """A method's name, perhaps with its settings, as it is written in papers.

    >>> display("soro+dbt"), display("pcgrad (alpha=0.1)"), display("torchjd:UPGrad")
    ('SORO+DBT', 'PCGrad (alpha=0.1)', 'torchjd:UPGrad')
    """
    name, space, rest = label.partition(" ")
    if name not in METHODS:
        return label
    written = METHODS[name].__name__
    return (written if written.lower() == name else name.upper()) + space + rest


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """A look for each label; a method has the same one in every figure.

    >>> looks(["er", "soro"])["soro"] == looks(["soro", "soro (sigma=10)"])["soro"]
    True
    """
    wanted = list(dict.fromkeys(labels))
    known = [*OURS, *(name for name in METHODS if name not in OURS)]
    order = [*known, *(label for label in wanted if label not in known)]
    return {label: _look(order.index(label)) for label in wanted}


def distinct_looks(count: int) -> list[Look]:
    """As many looks, for lines that are not methods."""
    marks = zip(range(count), cycle(COLOURS), cycle(LINES), cycle(MARKERS), strict=False)
    return [Look(colour, line, marker, width=1.5, height=3) for _, colour, line, marker in marks]


def _look(place: int) -> Look:
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    if place < len(OURS):
        return Look(colour, LINES[place], marker, width=2.0, height=4 + place)
    return Look(colour, LINES[place // len(COLOURS) % len(LINES)], marker, width=1.2, height=3)
