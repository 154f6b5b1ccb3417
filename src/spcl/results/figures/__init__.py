"""The paper's figures, drawn from the records of runs."""

from spcl.results.figures.compare import compare_figure, save_comparison
from spcl.results.figures.drawing import (
    Drawing,
    FigureSpec,
    MissingRunsError,
    draw_figure,
    figure_paths,
    save_drawing,
)
from spcl.results.figures.registry import FIGURES, figure_spec
from spcl.results.figures.selection import select_runs
from spcl.results.figures.timeline import draw_protocol

__all__ = [
    "FIGURES",
    "Drawing",
    "FigureSpec",
    "MissingRunsError",
    "compare_figure",
    "draw_figure",
    "draw_protocol",
    "figure_paths",
    "figure_spec",
    "save_comparison",
    "save_drawing",
    "select_runs",
]
