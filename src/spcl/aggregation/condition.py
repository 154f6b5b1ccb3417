"""Gradients of bounded condition number κ that are nearest to given gradients G, or nearest to them in direction."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation.gramians import host_gramian
from spcl.aggregation.soro import checked_preference, right_singular
from spcl.errors import SpclError

Array = NDArray[np.float64]
NormScale = Literal["unit", "min", "median", "mean", "norm"]

ROUNDING = 1e-10
"""Squared singular values of unit gradients up to this bound are rounding errors of float32 gradients."""


@dataclass(frozen=True)
class ConditionSolution:
    """Result of :func:`solve_condition`; Ĝ = G M itself is never formed.

    Attributes:
        weights: M W, one weight per task: the update is G (M W).
        adjusted: ĜᵀĜ, the Gramian of the adjusted gradients.
        interval: the interval to which the singular values of G are clipped.
    """

    weights: Tensor
    adjusted: Tensor
    interval: tuple[float, float]


def solve_condition(
    gramian: Tensor,
    *,
    max_condition: float | None = None,
    lambda_: float | None = None,
    cutoff: float = 2.0**-52,
    preference: Tensor | None = None,
) -> ConditionSolution:
    r"""Return the gradients nearest to G of a bounded, or penalised, condition number κ, from :math:`C = G^\top G`.

    .. math:: \min_{\hat G} \|G - \hat G\|_F^2 \quad\text{subject to}\quad \kappa(\hat G) \le \kappa_{max},
        \qquad\text{or}\qquad \min_{\hat G} \|G - \hat G\|_F^2 + \lambda\, \kappa(\hat G)

    The second problem is the paper's eq. 7. Of all matrices with given singular values, the one nearest to
    :math:`G = U S V^\top` has the singular vectors of G (von Neumann's trace inequality); of all values in [a, b], the
    nearest to S are S clipped to it. So :math:`\hat G = U\, \mathrm{clip}(S, a, b)\, V^\top = G M` with a T×T matrix
    M; :func:`nearest_interval` or :func:`penalised_interval` finds the best a and b. Singular values of zero stay zero
    and do not count in κ.

    Args:
        gramian: C, T×T, symmetric and finite.
        max_condition: κ_max, at least 1; give this or ``lambda_``.
        lambda_: λ, positive.
        cutoff: eigenvalues of C up to this times T times the largest count as zero.
        preference: W, one number per task; all ones by default: the update is the sum of the adjusted gradients.

    >>> C = torch.tensor([[16.0, 0.0], [0.0, 1.0]])       # norms 4 and 1, so that κ is 4
    >>> solution = solve_condition(C, max_condition=2.0)
    >>> solution.interval
    (1.8, 3.6)
    >>> solution.weights                                  # 3.6/4 and 1.8/1
    tensor([0.9000, 1.8000], dtype=torch.float64)
    """
    if (max_condition is None) == (lambda_ is None):
        raise SpclError(f"max_condition is {max_condition} and lambda_ {lambda_}; give one of them")
    S, V = right_singular(host_gramian(gramian), cutoff)
    W = V.sum(axis=0) if preference is None else V.T @ checked_preference(preference, len(V))
    interval = 0.0, 0.0
    if len(S):
        interval = nearest_interval(S, max_condition or 1.0) if lambda_ is None else penalised_interval(S, lambda_)
    clipped = np.clip(S, *interval)
    weights, adjusted = (V * (clipped / S)) @ W, (V * clipped**2) @ V.T
    return ConditionSolution(torch.from_numpy(weights), torch.from_numpy(adjusted), interval)


def nearest_interval(singular: Array, max_condition: float) -> tuple[float, float]:
    r"""Return the interval [a, κa] such that clipping to it changes positive singular values :math:`s_i` least.

    If no value needs to change, it is the interval from the smallest to the largest value.

    The squared change :math:`\sum_i (a - s_i)_+^2 + (s_i - \kappa a)_+^2` is convex in a and quadratic between the
    breakpoints :math:`s_i` and :math:`s_i/\kappa`. Where its slope changes sign, its minimum is
    :math:`(\sum_{low} s_i + \kappa \sum_{high} s_i) / (n_{low} + \kappa^2 n_{high})`.

    >>> nearest_interval(np.array([1.0, 2.0, 6.0]), 1.0)          # all equal: their mean
    (3.0, 3.0)
    >>> nearest_interval(np.array([1.0, 2.0, 6.0]), 10.0)
    (1.0, 6.0)
    """
    least, most = float(singular.min()), float(singular.max())
    if most <= max_condition * least:
        return least, most
    points = np.sort(np.concatenate([singular, singular / max_condition]))
    low, high = singular < points[:, None], singular > max_condition * points[:, None]
    slopes = (points[:, None] - singular) * low - max_condition * (singular - max_condition * points[:, None]) * high
    first = int(np.argmax(slopes.sum(axis=1) >= 0.0))  # the minimum is between this point and the one before
    middle = (points[max(first - 1, 0)] + points[first]) / 2.0
    below, above = singular[singular <= middle], singular[singular >= max_condition * middle]
    a = (below.sum() + max_condition * above.sum()) / (len(below) + max_condition**2 * len(above))
    return float(a), float(max_condition * a)


def penalised_interval(singular: Array, lambda_: float) -> tuple[float, float]:
    r"""Return [a, b] that minimises :math:`\sum_i (a - s_i)_+^2 + (s_i - b)_+^2 + \lambda b/a` (eq. 7).

    If the p smallest values, of mean :math:`\bar s_{low}`, are below a and the q largest, of mean
    :math:`\bar s_{high}`, above b, the slopes vanish at a root a of :math:`2pa^4 - 2p \bar s_{low} a^3 -
    \lambda \bar s_{high} a + \lambda^2/(2q)` and at :math:`b = \bar s_{high} - \lambda/(2qa)`. The minimum is at one
    of these points, for some p and q, or where a = b is the mean of all values.

    >>> penalised_interval(np.array([1.0, 2.0, 6.0]), 1e6)        # a large λ: all equal
    (3.0, 3.0)
    >>> a, b = penalised_interval(np.array([1.0, 2.0, 6.0]), 0.1)
    >>> round(a, 3), round(b, 3)
    (1.205, 5.959)
    """
    S = np.sort(singular)
    scale = S[-1]  # dividing by it brings the coefficients of the quartics to order 1
    S, lambda_ = S / scale, lambda_ / scale**2
    mean = S.mean()
    candidates = np.concatenate([[[mean, mean]], _stationary(S, lambda_)])
    a, b = candidates.T
    changes = np.clip(S, a[:, None], b[:, None]) - S
    values = (changes**2).sum(axis=1) + lambda_ * b / a
    best = candidates[int(np.argmin(values))] * scale
    return float(best[0]), float(best[1])


def _stationary(S: Array, lambda_: float) -> Array:
    """Return the intervals at which the slopes vanish, for all p and q."""
    counts = np.arange(1, len(S))
    p, q = (each.ravel() for each in np.meshgrid(counts, counts))
    p, q = p[p + q <= len(S)], q[p + q <= len(S)]
    below, above = (S.cumsum()[:-1] / counts)[p - 1], (S[::-1].cumsum()[:-1] / counts)[q - 1]
    companions = np.zeros((len(p), 4, 4))
    companions[:, [1, 2, 3], [0, 1, 2]] = 1.0
    companions[:, 0, 0] = below
    companions[:, 0, 2] = lambda_ * above / (2.0 * p)
    companions[:, 0, 3] = -(lambda_**2) / (4.0 * p * q)
    roots = np.linalg.eigvals(companions)
    a = roots.real
    with np.errstate(divide="ignore", invalid="ignore"):
        b = above[:, None] - lambda_ / (2.0 * q[:, None] * a)
    valid = (np.abs(roots.imag) <= 1e-7 * np.abs(a)) & (a > 0.0) & (b >= a)
    return np.stack([a[valid], b[valid]], axis=1)


def solve_scale_free(
    gramian: Tensor, *, max_condition: float, scale: NormScale = "median", preference: Tensor | None = None
) -> ConditionSolution:
    r"""Return the unit gradients of bounded condition number, times a typical norm, from :math:`C = G^\top G`.

    .. math:: \hat G = s\, \hat E, \qquad \hat E = \arg\min_{\kappa(\hat E) \le \kappa_{max}} \|E - \hat E\|_F^2,
        \qquad E = \left(\frac{g_1}{\|g_1\|}, …, \frac{g_T}{\|g_T\|}\right)

    If a gradient is multiplied by a positive number, neither E nor the direction of the update :math:`\hat G W`
    changes. The length of the update is set by the scale s:

    - ``"unit"``: s = 1, so the length does not change either, but the update does not shrink with the gradients;
    - ``"min"``: the smallest norm;
    - ``"median"``: the (lower) median of the norms; with three or more gradients, none decides it alone;
    - ``"mean"``: the geometric mean of the norms; multiplying one of T gradients by c multiplies s by
      :math:`c^{1/T}`;
    - ``"norm"``: the update gets the length of :math:`G W`, which the longest gradient dominates.

    Zero gradients are skipped: their weights are 0. If gradients are linearly dependent, κ is the condition number on
    the range of E, as in :func:`solve_condition`. A single gradient changes only with ``"unit"``.

    Args:
        gramian: C, T×T, symmetric and finite.
        max_condition: κ_max, at least 1: 1 makes unit gradients orthogonal, a large number does not change them.
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
    """Return weights, Gramian and interval of the adjusted gradients, given gradients other than zero."""
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
    """Return c such that ‖c·Σ wᵢ gᵢ/‖gᵢ‖‖ = ‖Σ Wᵢ gᵢ/‖gᵢ‖‖, for weights w and wanted weights W."""
    length, norm = (math.sqrt(max(float(each @ cosines @ each), 0.0)) for each in (wanted, weights))
    return length / norm if norm > 0.0 else 0.0
