"""The DBT penalty of one kernel and its gradient, by whichever of three exact methods costs least."""

import torch
from torch import Tensor

from spcl.orthogonality.layers import Layer
from spcl.orthogonality.matrix import matrix_penalty
from spcl.orthogonality.shifts import shift_penalty
from spcl.orthogonality.spectral import spectral_penalty

__all__ = ["layer_penalty"]


@torch.no_grad()
def layer_penalty(layer: Layer, gradient: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """The penalty of one layer; adds `alpha` times its gradient to `gradient`, a tensor of the weight's shape.

    >>> weight = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> layer_penalty(Layer("linear", weight, groups=1, stride=()), gradient := torch.zeros(2, 2))
    tensor(9.)
    >>> gradient
    tensor([[24., 0.], [ 0., 0.]])
    """
    with torch.autocast(layer.weight.device.type, enabled=False):
        shape = (layer.groups, -1, *layer.weight.shape[1:])
        kernel = layer.weight.to(torch.promote_types(layer.weight.dtype, torch.float32)).view(shape)
        target = None if gradient is None else gradient.view(shape)
        if all(size <= step for size, step in zip(kernel.shape[3:], layer.stride, strict=True)):
            return matrix_penalty(kernel.flatten(2), target, alpha)
        if all(step == 1 for step in layer.stride):
            return spectral_penalty(kernel, target, alpha)
        return shift_penalty(kernel, layer.stride, target, alpha)
