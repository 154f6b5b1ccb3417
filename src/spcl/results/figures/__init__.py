"""The paper's figures and comparisons of runs, drawn with Matplotlib."""

from spcl.results.figures.comparison import comparison_figure, comparison_path, save_comparison
from spcl.results.figures.drawing import Drawing, draw_figure, figure_paths, save_drawing
from spcl.results.figures.paper.timeline import draw_protocol
from spcl.results.figures.registry import FIGURES, figure_spec
from spcl.results.figures.spec import FigureSpec, MissingRunsError

__all__ = [
    "FIGURES",
    "Drawing",
    "FigureSpec",
    "MissingRunsError",
    "comparison_figure",
    "comparison_path",
    "draw_figure",
    "draw_protocol",
    "figure_paths",
    "figure_spec",
    "save_comparison",
    "save_drawing",
]
