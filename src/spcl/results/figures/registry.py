"""The figures of the paper, found in the modules of ``spcl.results.figures.paper``."""

import re
from importlib import import_module
from pkgutil import iter_modules

from spcl.errors import SpclError
from spcl.results.figures import paper
from spcl.results.figures.spec import FigureSpec
from spcl.suggestions import did_you_mean

__all__ = ["FIGURES", "figure_spec"]


def _find_figures() -> dict[str, FigureSpec]:
    """Return the ``FIGURE`` of every module by name, in the order of their numbers in the paper."""
    modules = [import_module(f"{paper.__name__}.{module.name}") for module in iter_modules(paper.__path__)]
    figures: list[FigureSpec] = sorted((module.FIGURE for module in modules), key=_position)
    return {figure.name: figure for figure in figures}


def _position(figure: FigureSpec) -> float:
    """Return the first number: Section 5.1 stands between Figures 5 and 6."""
    return float(re.findall(r"[\d.]+", figure.number)[0])


FIGURES = _find_figures()
"""Every figure, by name."""


def figure_spec(name: str) -> FigureSpec:
    """Return the figure of this name.

    >>> figure_spec("ablation").number
    'Figure 3'
    >>> figure_spec("ablaton")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: there is no figure 'ablaton'; did you mean 'ablation'?
    """
    if name not in FIGURES:
        raise SpclError(f"there is no figure {name!r}; {did_you_mean(name, FIGURES)}")
    return FIGURES[name]
