"""Gradients of bounded condition number: the paper's eq. 7, and the nearest matrix of a given condition number."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation.gramians import host_gramian
from spcl.aggregation.soro_solver import checked_preference, right_singular
from spcl.errors import SpclError

__all__ = ["ConditionSolution", "nearest_interval", "penalised_interval", "solve_condition"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ConditionSolution:
    """Result of :func:`solve_condition`; Ĝ = G M itself is never formed.

    Attributes:
        weights: M W, one weight per task: the update is G (M W).
        adjusted: ĜᵀĜ, the Gramian of the adjusted gradients.
        interval: the interval that the singular values of G are clipped to.
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

    The second is the paper's eq. 7. Of all matrices with given singular values the nearest to :math:`G = U S V^\top`
    has its singular vectors (von Neumann's trace inequality), and of all values in [a, b] the nearest to S are S
    clipped to it: :math:`\hat G = U\, \mathrm{clip}(S, a, b)\, V^\top = G M`, with a T×T matrix M. The best a and b are
    those of :func:`nearest_interval` or :func:`penalised_interval`. Singular values of zero stay; κ leaves them out.

    Args:
        gramian: C, T×T, symmetric and finite.
        max_condition: κ_max, at least 1; give this or ``lambda_``.
        lambda_: λ, positive.
        cutoff: eigenvalues of C up to this times T times the largest count as zero.
        preference: W, one number per task; all ones by default, so that the update is the sum of Ĝ's columns.

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
    interval = _interval(S, max_condition, lambda_)
    clipped = np.clip(S, *interval)
    weights, adjusted = (V * (clipped / S)) @ W, (V * clipped**2) @ V.T
    return ConditionSolution(torch.from_numpy(weights), torch.from_numpy(adjusted), interval)


def _interval(S: Array, max_condition: float | None, lambda_: float | None) -> tuple[float, float]:
    if not len(S):
        return 0.0, 0.0
    return nearest_interval(S, max_condition or 1.0) if lambda_ is None else penalised_interval(S, lambda_)


def nearest_interval(singular: Array, max_condition: float) -> tuple[float, float]:
    r"""Return the interval [a, κa] clipping to which changes positive singular values :math:`s_i` least.

    If none need be changed, it is that of the values themselves.

    The squared change :math:`\sum_i (a - s_i)_+^2 + (s_i - \kappa a)_+^2` is convex in a and quadratic between the
    breakpoints :math:`s_i` and :math:`s_i/\kappa`, with its minimum :math:`(\sum_{low} s_i + \kappa \sum_{high} s_i) /
    (n_{low} + \kappa^2 n_{high})` where its slope changes sign.

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

    Where the p smallest values are below a and the q largest above b, the slopes vanish for :math:`b = \bar s_{high} -
    \lambda/(2qa)` and a root a of :math:`2pa^4 - 2p \bar s_{low} a^3 - \lambda \bar s_{high} a + \lambda^2/(2q)`, with
    the means of those values. The minimum is at one of these, for any p and q, or where a = b is the mean of all.

    >>> penalised_interval(np.array([1.0, 2.0, 6.0]), 1e6)        # a large λ: all equal
    (3.0, 3.0)
    >>> a, b = penalised_interval(np.array([1.0, 2.0, 6.0]), 0.1)
    >>> round(a, 3), round(b, 3)
    (1.205, 5.959)
    """
    S = np.sort(singular)
    scale = S[-1]  # of order 1: the coefficients of the quartics then are, too
    S, lambda_ = S / scale, lambda_ / scale**2
    mean = S.mean()
    candidates = np.concatenate([[[mean, mean]], _stationary(S, lambda_)])
    a, b = candidates.T
    changes = np.clip(S, a[:, None], b[:, None]) - S
    values = (changes**2).sum(axis=1) + lambda_ * b / a
    best = candidates[int(np.argmin(values))] * scale
    return float(best[0]), float(best[1])


def _stationary(S: Array, lambda_: float) -> Array:
    """Return the intervals at which slopes vanish, for all numbers of values below and above."""
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
