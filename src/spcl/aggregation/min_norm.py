"""The minimum-norm combination of gradients, used by MGDA, MaxDO and EMGD, and EMGD's elastic variant."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation.gramians import eigenvectors, host_gramian

Array = NDArray[np.float64]


def min_norm_weights(gramian: Tensor, coefficients: Tensor | None = None, lower: float = 0.0) -> Tensor:
    r"""Return the weights of the minimum-norm combination of gradients, from their Gramian :math:`C`.

    .. math:: \min_w \|\textstyle\sum_i w_i g_i\|^2 = w^\top C w
        \quad\text{subject to}\quad \textstyle\sum_i \sigma_i w_i = 1,\; w_i \ge l

    Solved to rounding error by an active-set method. With v = w − l ≥ 0 and the gradients shifted accordingly, the
    problem is homogeneous: up to a factor, its solution is the solution of the non-negative least squares
    :math:`\min_{v \ge 0} \|G'v\|^2 + (\sigma^\top v - 1)^2`.

    Args:
        gramian: C, T×T, symmetric and finite.
        coefficients: σ, positive; all ones by default, which gives the simplex (MGDA).
        lower: l, with :math:`l \sum_i \sigma_i < 1`.

    >>> import torch
    >>> min_norm_weights(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
    tensor([0.8000, 0.2000], dtype=torch.float64)
    >>> min_norm_weights(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), lower=0.25)
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    C = host_gramian(gramian)
    sigma = np.ones(len(C)) if coefficients is None else coefficients.to("cpu", torch.float64).numpy()
    if not len(C):
        return torch.zeros(0, dtype=torch.float64)
    spare = 1.0 - lower * sigma.sum()
    shift = np.eye(len(C)) + lower / spare * sigma
    v = _min_norm_direction(shift.T @ C @ shift, sigma)
    return torch.from_numpy(lower + v * (spare / (sigma @ v)))


def _min_norm_direction(C: Array, sigma: Array) -> Array:
    """Return the minimiser up to a positive factor; gradients are normalised so that rounding keeps small ones."""
    norms = np.sqrt(np.maximum(C.diagonal(), 0.0))
    least = norms[norms > 0.0].min(initial=norms.max() or 1.0)
    norms = np.where(norms > 0.0, norms, least)
    eigenvalues, V = eigenvectors(C / norms[:, None] / norms)
    root = np.sqrt(np.maximum(eigenvalues, 0.0))[:, None] * V.T
    stretch = least / norms
    from scipy.optimize import nnls

    v, _ = nnls(np.vstack([root, sigma * stretch]), np.append(np.zeros(len(C)), 1.0), maxiter=100 * len(C))
    return np.asarray(v * stretch)


def emgd_weights(gramian: Tensor, running_norms: Tensor, temperature: float = 5.0) -> Tensor:
    r"""Return the weights of elastic multi-gradient descent.

    .. math:: \min_w \|\textstyle\sum_i w_i g_i\|^2
        \quad\text{subject to}\quad \textstyle\sum_i \sigma_i w_i = 1,\; w_i \ge \tfrac{1}{T+1}

    with the elastic factors :math:`\sigma = \mathrm{softmax}(m / \tau)` of the running gradient norms m.

    Lyu et al., *Elastic Multi-Gradient Descent for Parallel Continual Learning*, IEEE TPAMI; arXiv 2401.01054.

    Args:
        gramian: C, T×T, symmetric and finite.
        running_norms: m, one number per gradient.
        temperature: τ.

    >>> import torch
    >>> emgd_weights(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), torch.tensor([1.0, 2.0]))
    tensor([1.6180, 0.4940], dtype=torch.float64)
    """
    elasticity = (running_norms.double() / temperature).softmax(dim=0)
    return min_norm_weights(gramian, elasticity, lower=1.0 / (len(gramian) + 1))
