"""The figures by name, in the order of the paper."""

from difflib import get_close_matches

from spcl.errors import SpclError
from spcl.results.figures.ablation import ABLATION
from spcl.results.figures.convolutions import CONVOLUTIONS
from spcl.results.figures.drawing import FigureSpec
from spcl.results.figures.gradients import GRADIENTS
from spcl.results.figures.hyperparameters import HYPERPARAMETERS
from spcl.results.figures.learning_process import LEARNING_PROCESS
from spcl.results.figures.paradigms import PARADIGMS
from spcl.results.figures.rehearsal import REHEARSAL
from spcl.results.figures.timeline import TIMELINE
from spcl.results.figures.toy import TOY, TOY_TIMELINES

__all__ = ["FIGURES", "figure_spec"]

FIGURES: dict[str, FigureSpec] = {
    spec.name: spec
    for spec in (
        *(TOY, LEARNING_PROCESS, ABLATION, GRADIENTS, CONVOLUTIONS, TIMELINE),
        *(PARADIGMS, HYPERPARAMETERS, REHEARSAL, TOY_TIMELINES),
    )
}
"""Every figure, by name."""


def figure_spec(name: str) -> FigureSpec:
    """The figure of this name.

    >>> figure_spec("ablation").number
    'Figure 3'
    >>> figure_spec("ablaton")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: there is no figure 'ablaton'; did you mean 'ablation'? 'spcl figure' lists them
    """
    if name not in FIGURES:
        near = get_close_matches(name, FIGURES, n=1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise SpclError(f"there is no figure {name!r};{hint} 'spcl figure' lists them")
    return FIGURES[name]
