"""A-GEM's projection of a gradient, as weights of two gradients."""

from torch import Tensor

from spcl.aggregation.gramians import host_gramian
from spcl.errors import SpclError


def agem_weights(gramian: Tensor) -> Tensor:
    r"""Return the weights of (g, g_m) that make g orthogonal to g_m where the two conflict.

    .. math:: u = g - \min\!\Big(\frac{g \cdot g_m}{g_m \cdot g_m}, 0\Big)\, g_m

    Chaudhry et al., *Efficient Lifelong Learning with A-GEM*, ICLR 2019, eq. 11. A single gradient gets weight 1.

    Args:
        gramian: C of (g, g_m), or of g alone; the weights have its dtype and device.

    >>> import torch
    >>> agem_weights(torch.tensor([[5.0, -1.0], [-1.0, 2.0]]))
    tensor([1.0000, 0.5000])
    >>> agem_weights(torch.tensor([[5.0, 1.0], [1.0, 2.0]]))
    tensor([1., 0.])
    """
    C = host_gramian(gramian)
    if len(C) not in (1, 2):
        raise SpclError(f"the Gramian is {len(C)}×{len(C)}, but A-GEM combines one gradient with one reference")
    weights = [1.0]
    if len(C) == 2:
        weights.append(-C[0, 1] / C[1, 1] if C[0, 1] < 0.0 < C[1, 1] else 0.0)
    return gramian.new_tensor(weights)
