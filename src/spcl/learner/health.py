"""The health of gradients: which of a step's gradients are not finite, and why."""

from collections.abc import Callable, Sequence
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from spcl.methods.base import MEMORY

__all__ = ["find_faults", "row_norms"]

Array = NDArray[np.float64]


def find_faults(names: Sequence[str], health: Array, buffers_were_finite: Callable[[], bool]) -> dict[str, str]:
    """Return the gradients that are faulty, each with the reason.

    A gradient's health is its loss, its norm and the norm of the model's buffers after its forward pass; any non-finite
    value marks it as faulty. Gradients after a faulty one may be affected by it: unless their own loss is not finite,
    they are judged when the step is repeated.

    Args:
        names: of the gradients, tasks before memory.
        health: one row of three numbers per gradient.
        buffers_were_finite: whether the buffers' norm was finite before the step.

    >>> find_faults(["a", "b"], np.array([[0.5, 1.0, 1.0], [np.nan, 1.0, 1.0]]), lambda: True)
    {'b': 'its loss is nan'}
    """
    faults: dict[str, str] = {}
    if np.isfinite(health).all():
        return faults
    for name, (loss, norm, buffers) in zip(names, health.tolist(), strict=True):
        if faults and (name == MEMORY or isfinite(loss)):
            continue
        if not isfinite(loss):
            faults[name] = f"its loss is {loss}"
        elif not isfinite(norm):
            faults[name] = f"its gradient is not finite, or too large to be squared (loss {loss:g})"
        elif not isfinite(buffers) and buffers_were_finite():
            faults[name] = f"the model's running averages overflow on its inputs (loss {loss:g})"
    return faults


def row_norms(squares: Array, largest: float) -> Array:
    """Return the norms of gradients, given their squares.

    Squares above ``largest`` count as infinite: an optimiser that squares such a gradient overflows.

    >>> row_norms(np.array([4.0, 1e39]), largest=3e38)
    array([ 2., inf])
    """
    return np.array([sqrt(abs(square)) if square < largest else inf for square in squares.tolist()])
