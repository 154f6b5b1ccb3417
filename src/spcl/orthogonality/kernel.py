"""The DBT penalty of layers and its gradient, by the cheapest of four exact methods."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from spcl.orthogonality.layers import Layer
from spcl.orthogonality.matrix import matrix_penalty
from spcl.orthogonality.phases import phase_penalty
from spcl.orthogonality.shifts import shift_penalty
from spcl.orthogonality.spectral import spectral_penalty

__all__ = ["layer_penalty", "layers_penalty"]


@torch.no_grad()
def layer_penalty(layer: Layer, gradient: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """Return the penalty of one layer, and add `alpha` times its gradient to `gradient`, of the weight's shape.

    >>> weight = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> layer_penalty(Layer("linear", weight, groups=1, stride=()), gradient := torch.zeros(2, 2))
    tensor(9.)
    >>> gradient
    tensor([[24., 0.], [ 0., 0.]])
    """
    with torch.autocast(layer.weight.device.type, enabled=False):
        target = None if gradient is None else gradient.view(_kernel_shape(layer))
        return _kernel_penalty(_kernel(layer), layer.stride, target, alpha)


@torch.no_grad()
def layers_penalty(layers: Sequence[Layer], gradients: Sequence[Tensor | None], alpha: float = 1.0) -> Tensor:
    """Return the penalty of several layers, and add `alpha` times their gradients to `gradients` (None: none needed).

    On an accelerator, layers of the same shape are computed as one batch, because many small CUDA kernels are slower
    than a few large ones; on a CPU one layer at a time, which needs the least memory.

    >>> layers = [Layer("", torch.full((1, 1), size), groups=1, stride=()) for size in (2.0, 3.0)]
    >>> layers_penalty(layers, [None, None])
    tensor(73.)
    """
    pairs = list(zip(layers, gradients, strict=True))
    if layers[0].weight.device.type == "cpu":
        return torch.stack([layer_penalty(layer, gradient, alpha) for layer, gradient in pairs]).sum()
    batches = groupby(sorted(pairs, key=_batch_key), key=_batch_key)
    return torch.stack([_joint_penalty(list(batch), alpha) for _, batch in batches]).sum()


def _joint_penalty(batch: Sequence[tuple[Layer, Tensor | None]], alpha: float) -> Tensor:
    """Return the penalty of layers of the same shape, computed at once."""
    layer, gradient = batch[0]
    if len(batch) == 1:
        return layer_penalty(layer, gradient, alpha)
    with torch.autocast(layer.weight.device.type, enabled=False):
        kernels = _joined([_kernel(layer) for layer, _ in batch])
        if gradient is None:
            return _kernel_penalty(kernels, layer.stride, None, alpha)
        found = torch.zeros_like(kernels)
        penalty = _kernel_penalty(kernels, layer.stride, found, alpha)
        for (_, target), part in zip(batch, found.chunk(len(batch)), strict=True):
            assert target is not None
            target.add_(part.view(target.shape))
        return penalty


def _joined(kernels: Sequence[Tensor]) -> Tensor:
    """Concatenate kernels as groups of one, with taps outermost in memory, the layout of :func:`spectral_penalty`."""
    taps = range(3, kernels[0].ndim)
    parts = [kernel.permute(*taps, 0, 1, 2) for kernel in kernels]
    groups = sum(len(kernel) for kernel in kernels)
    whole = parts[0].new_empty(*kernels[0].shape[3:], groups, *kernels[0].shape[1:3])
    torch.cat(parts, dim=len(taps), out=whole)
    return whole.movedim((-3, -2, -1), (0, 1, 2))


def _batch_key(pair: tuple[Layer, Tensor | None]) -> tuple[object, ...]:
    layer, gradient = pair
    return tuple(layer.weight.shape), layer.groups, layer.stride, str(layer.weight.dtype), gradient is None


def _kernel_shape(layer: Layer) -> tuple[int, ...]:
    return layer.groups, -1, *layer.weight.shape[1:]


def _kernel(layer: Layer) -> Tensor:
    return layer.weight.to(torch.promote_types(layer.weight.dtype, torch.float32)).view(_kernel_shape(layer))


def _kernel_penalty(kernel: Tensor, stride: Sequence[int], gradient: Tensor | None, alpha: float) -> Tensor:
    if all(size <= step for size, step in zip(kernel.shape[3:], stride, strict=True)):
        return matrix_penalty(kernel.flatten(2), gradient, alpha)
    if all(step == 1 for step in stride):
        return spectral_penalty(kernel, gradient, alpha)
    strided = shift_penalty if kernel.device.type == "cpu" else phase_penalty
    return strided(kernel, stride, gradient, alpha)
