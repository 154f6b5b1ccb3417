"""EMGD: the minimum-norm combination under elastic factors."""

from torch import Tensor

from spcl.aggregation.min_norm import min_norm_weights

__all__ = ["emgd_weights"]


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
