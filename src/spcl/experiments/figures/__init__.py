"""The paper's figures, drawn from the records of runs."""

from spcl.experiments.figures.compare import compare_figure, save_comparison
from spcl.experiments.figures.drawing import (
    Drawing,
    FigureSpec,
    MissingRunsError,
    draw_figure,
    figure_paths,
    save_drawing,
)
from spcl.experiments.figures.registry import FIGURES, figure_spec
from spcl.experiments.figures.selection import select_runs
from spcl.experiments.figures.timeline import draw_protocol

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
