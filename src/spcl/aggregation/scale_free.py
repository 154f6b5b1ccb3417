"""Gradients of bounded condition number, whatever their norms."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation.condition import ConditionSolution, solve_condition
from spcl.aggregation.gramians import host_gramian
from spcl.aggregation.soro_solver import checked_preference

__all__ = ["NormScale", "solve_scale_free"]

Array = NDArray[np.float64]
NormScale = Literal["unit", "min", "median", "mean", "norm"]

ROUNDING = 1e-10
"""Squared singular values of unit gradients up to this are rounding errors of gradients in float32."""


def solve_scale_free(
    gramian: Tensor, *, max_condition: float, scale: NormScale = "median", preference: Tensor | None = None
) -> ConditionSolution:
    r"""Return the unit gradients of bounded condition number, times a typical norm, from :math:`C = G^\top G`.

    .. math:: \hat G = s\, \hat E, \qquad \hat E = \arg\min_{\kappa(\hat E) \le \kappa_{max}} \|E - \hat E\|_F^2,
        \qquad E = \left(\frac{g_1}{\|g_1\|}, …, \frac{g_T}{\|g_T\|}\right)

    Where a gradient is multiplied by a positive number, E does not change, nor does the direction of the update
    :math:`\hat G W`. Its length does, by the scale s:

    - ``"unit"``: s = 1. Nothing changes at all, but the update does not shrink as the gradients do;
    - ``"min"``: the smallest norm;
    - ``"median"``: the (lower) median of the norms, which of three or more gradients no single one decides;
    - ``"mean"``: the geometric mean of the norms, by which a factor c of one of T gradients becomes
      :math:`c^{1/T}`;
    - ``"norm"``: such that the update is as long as :math:`G W`, which the longest gradient decides.

    Gradients of zeros are left out, as if they were not there. Of gradients that depend linearly on one another,
    κ is that on the range of E, as in :func:`solve_condition`. A single gradient stays as it is, but for ``"unit"``.

    Args:
        gramian: C, T×T, symmetric and finite.
        max_condition: κ_max, at least 1: 1 makes unit gradients orthogonal, a large number leaves them as they are.
        scale: the scale s.
        preference: W, one number per task; all ones by default.

    >>> C = torch.tensor([[1.0, 0.0], [0.0, 1e-6]])       # orthogonal gradients with norms of 1 and 0.001
    >>> solve_scale_free(C, max_condition=2.0, scale="mean").weights
    tensor([3.1623e-02, 3.1623e+01], dtype=torch.float64)
    """
    C = host_gramian(gramian)
    W = checked_preference(preference, len(C))
    kept = np.flatnonzero(C.diagonal() > 0.0)
    weights, adjusted, interval = np.zeros(len(C)), np.zeros_like(C), (0.0, 0.0)
    if len(kept):
        weights[kept], adjusted[np.ix_(kept, kept)], interval = _solve(
            C[np.ix_(kept, kept)], W[kept], max_condition, scale
        )
    return ConditionSolution(torch.from_numpy(weights), torch.from_numpy(adjusted), interval)


def _solve(C: Array, W: Array, max_condition: float, scale: NormScale) -> tuple[Array, Array, tuple[float, float]]:
    """Return weights, Gramian and interval of the adjusted gradients, of which none is zero."""
    norms = np.sqrt(C.diagonal())
    cosines = C / np.outer(norms, norms)
    solution = solve_condition(
        torch.from_numpy(cosines), max_condition=max_condition, cutoff=ROUNDING, preference=torch.from_numpy(W)
    )
    unit: Array = solution.weights.numpy()
    factor = _preserving(cosines, unit, norms * W) if scale == "norm" else SCALES[scale](norms)
    low, high = solution.interval
    return factor * unit / norms, factor**2 * solution.adjusted.numpy(), (factor * low, factor * high)


SCALES: Mapping[str, Callable[[Array], float]] = {
    "unit": lambda norms: 1.0,
    "min": lambda norms: float(norms.min()),
    "median": lambda norms: float(np.sort(norms)[(len(norms) - 1) // 2]),
    "mean": lambda norms: float(np.exp(np.log(norms).mean())),
}


def _preserving(cosines: Array, weights: Array, wanted: Array) -> float:
    """Return the factor that gives the sum of unit gradients with these weights the norm of that with those wanted."""
    length, norm = (math.sqrt(max(float(each @ cosines @ each), 0.0)) for each in (wanted, weights))
    return length / norm if norm > 0.0 else 0.0
