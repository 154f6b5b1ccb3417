"""Figures of runs, drawn with Matplotlib."""

from spcl.results.figures.drawing import (
    FIGURES,
    Drawing,
    FigureSpec,
    GridCommand,
    MissingRunsError,
    all_figures,
    draw_figure,
    figure,
    figure_paths,
    figure_spec,
    save_drawing,
)
from spcl.results.figures.gallery import comparison_figure, comparison_path, draw_protocol, save_comparison

__all__ = [
    "FIGURES",
    "Drawing",
    "FigureSpec",
    "GridCommand",
    "MissingRunsError",
    "all_figures",
    "comparison_figure",
    "comparison_path",
    "draw_figure",
    "draw_protocol",
    "figure",
    "figure_paths",
    "figure_spec",
    "save_comparison",
    "save_drawing",
]
