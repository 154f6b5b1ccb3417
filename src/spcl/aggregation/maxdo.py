"""MaxDO, maximum discrepancy optimisation: exact, and by a few steps of descent as in the published SPCL code."""

import numpy as np
import torch
from torch import Tensor

from spcl.aggregation.gramians import host_gramian
from spcl.aggregation.min_norm import min_norm_weights

STEPS = 5  # of the descent
RATE = 5.0  # the published step sizes, 50 and 10, times their factor 0.1 of the distance
RATE_OF_TWO = 1.0
LEAST = 1e-5


def maxdo_weights(gramian: Tensor) -> Tensor:
    r"""Return MaxDO's weights: for each gradient the nearest convex combination of the others, and the shortest of all.

    The combination x of the other gradients is the one nearest to the gradient y in the asymmetric gradient distance

    .. math:: \mathrm{AGD}(x \to y) = \frac{\|x-y\|}{\|x-y\| + \|y\|}

    AGD grows with :math:`\|x-y\|`, so the nearest combination
    :math:`\sum_{j\ne i} w_j g_j` is the minimum-norm combination of the differences :math:`g_j - g_i`, whose Gramian is
    :math:`C_{jk} - C_{ji} - C_{ik} + C_{ii}`. The result is the mean of these T sets of weights and the weights of the
    minimum-norm combination of all gradients.

    Lyu et al., *Measuring Asymmetric Gradient Discrepancy in Parallel Continual Learning*, ICCV 2023.

    Args:
        gramian: C, T×T, symmetric and finite; the weights have its dtype and device.

    >>> maxdo_weights(torch.eye(2))
    tensor([0.5000, 0.5000])
    >>> maxdo_weights(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))      # (e2 + e1 + (0.8, 0.2)) / 3
    tensor([0.6000, 0.4000])
    """
    C = host_gramian(gramian)
    C = (C + C.T) / 2  # exactly symmetric, or rounding would outweigh small differences of large gradients
    weights = min_norm_weights(gramian).numpy()
    if len(C) > 1:
        for i in range(len(C)):
            others = np.delete(np.arange(len(C)), i)
            differences = C - C[:, [i]] - C[[i], :] + C[i, i]
            weights[others] += min_norm_weights(torch.from_numpy(differences[np.ix_(others, others)])).numpy()
        weights /= len(C) + 1
    return torch.from_numpy(weights).to(gramian)


def maxdo_descent_weights(gramian: Tensor) -> Tensor:
    r"""Return MaxDO's weights by five steps of gradient descent on a normalised distance, from the Gramian.

    For each gradient :math:`g_i`, :math:`x_i` is a convex combination of the other gradients; its coefficients are a
    softmax of parameters that start equal. The descent lowers

    .. math:: \frac{\sum_i \|x_i - g_i\|}{\sum_i \|x_i\| + \sum_i \|g_i\| + T \cdot 10^{-5}}

    over all gradients together, not the asymmetric gradient distance of each. The result is the mean of the T
    combinations and the minimum-norm combination. With two gradients, each :math:`x_i` is the other gradient times a
    parameter between 0 and 1, and the weights are a softmax of the sums.

    >>> maxdo_descent_weights(torch.eye(3))
    tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64)
    >>> maxdo_descent_weights(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
    tensor([0.7356, 0.2644], dtype=torch.float64)
    """
    C = torch.from_numpy(host_gramian(gramian))
    shortest = min_norm_weights(C)
    if len(C) < 2:
        return shortest
    if len(C) == 2:
        return _of_two(C, shortest)
    diagonal = torch.eye(len(C), dtype=torch.bool)
    A = torch.full_like(C, 1.0 / (len(C) - 1), requires_grad=True)
    for _ in range(STEPS):
        A = _descended(A, _distance(A.masked_fill(diagonal, -torch.inf).softmax(dim=1), C), RATE)
    combinations = A.detach().masked_fill(diagonal, -torch.inf).softmax(dim=1)
    return (combinations.sum(dim=0) + shortest) / (len(C) + 1)


def _of_two(C: Tensor, shortest: Tensor) -> Tensor:
    others = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=C.dtype)
    A = others.clone().requires_grad_()
    clipped = others
    for _ in range(STEPS):
        clipped = (A * others).clamp(0.0, 1.0)
        A = _descended(A, _distance(clipped, C), RATE_OF_TWO)
    return ((A * clipped).detach().sum(dim=0) + shortest).softmax(dim=0)


def _descended(A: Tensor, distance: Tensor, rate: float) -> Tensor:
    (slope,) = torch.autograd.grad(distance, A)
    return (A - rate * slope).detach().requires_grad_()


def _distance(combinations: Tensor, C: Tensor) -> Tensor:
    """Return the mean distance of the combinations from their gradients, over the mean norms of both."""
    own = torch.eye(len(C), dtype=C.dtype)
    apart, norms, own_norms = (_norms(weights, C).mean() for weights in (combinations - own, combinations, own))
    return apart / (norms + own_norms + LEAST)


def _norms(weights: Tensor, C: Tensor) -> Tensor:
    squares = (weights @ C * weights).sum(dim=1)
    return torch.where(squares > 0.0, squares, torch.ones_like(squares)).sqrt() * (squares > 0.0)
