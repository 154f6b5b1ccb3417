"""The DBT penalty of the layers of a module, as a differentiable loss or as a gradient added to buffers."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Never

import torch
from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.orthogonality.kernels import kernel_penalty
from spcl.orthogonality.layers import Layer, LayerChoice, find_layers


def orthogonality_penalty(module: nn.Module, layers: LayerChoice = None) -> Tensor:
    r"""Return the squared distance of the convolutions and linear layers of `module` from orthogonal maps.

    A convolution is a product with a doubly-block Toeplitz (DBT) matrix 𝓜, whose rows are copies of the kernel K
    (N×C×k×k) shifted by multiples of the stride S. The penalty is ‖𝓜𝓜ᵀ − I‖² per output position, summed over
    the layers, which the paper writes as ‖Conv(K, K, padding=P, stride=S) − I₀‖² (§4.2, Eq. 3 and 4):

        O_s[n, m] = Σ_{c,p} K[n, c, p+s] · K[m, c, p]       for shifts s that are multiples of S, up to P = ⌊(k−1)/S⌋·S
        penalty   = Σ_s ‖O_s‖²                              with I subtracted from O_0

    - Linear layers are the case k = 1: ‖WWᵀ − I‖².
    - Each group of a grouped convolution has its own matrix; groups share no input.
    - Dilated kernels overlap where the shift is also a multiple of the dilation.
    - A transposed convolution is the adjoint of the convolution with the same weight and has its penalty, which makes
      the *columns* of the transposed convolution orthonormal.

    The penalty is on the rows. If there are too many rows to be orthonormal, as in a linear layer with more outputs
    than inputs, its minimum is positive and reached when the columns are orthonormal.

    The gradient is in closed form and computed with the value, so `backward` adds no cost; it cannot be differentiated
    again.

    Args:
        module: Any module. A single layer has the name `""`.
        layers: All convolutions and linear layers (`None`), a predicate `(name, layer) -> bool`, or names.

    >>> net = nn.Sequential(nn.Conv2d(1, 1, 2, bias=False), nn.Linear(2, 2))
    >>> _ = nn.init.ones_(net[0].weight), nn.init.eye_(net[1].weight)
    >>> penalty = orthogonality_penalty(net)  # 3² at s = 0, 2² at four shifts, 1² at four more; the linear layer has 0
    >>> penalty
    tensor(29., grad_fn=...)
    >>> penalty.backward()
    >>> net[0].weight.grad.round()
    tensor([[[[32., 32.],
              [32., 32.]]]])
    >>> orthogonality_penalty(net, layers=["1"])
    tensor(0., grad_fn=...)
    """
    penalties = [
        _Penalty.apply(layer.weight, layer)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and layer.weight.requires_grad
        else layer_penalty(layer)
        for layer in find_layers(module, layers)
    ]
    return torch.stack(penalties).sum()


@torch.no_grad()
def add_orthogonality_gradient(
    module: nn.Module, buffers: Mapping[nn.Parameter, Tensor], alpha: float = 1.0, layers: LayerChoice = None
) -> Tensor:
    """Add `alpha` times the gradient of `orthogonality_penalty` to `buffers` and return the penalty.

    For training loops that manage gradients themselves: the penalty depends only on the weights, so its gradient is
    computed once per step and added to every task's gradient (line 5 of the paper's Algorithm 2).
    The call does not synchronise with the device.

    Args:
        module: The module with the layers.
        buffers: For every chosen layer's weight a tensor of its shape, such as a view into one flat gradient. Frozen
            weights need none; they still count in the penalty.
        alpha: The weight α of the penalty in the loss.
        layers: As in `orthogonality_penalty`.

    >>> linear = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.constant_(linear.weight, 1.0)
    >>> flat = torch.zeros(4)
    >>> add_orthogonality_gradient(linear, {linear.weight: flat.view(2, 2)}, alpha=0.5)
    tensor(10.)
    >>> flat  # 0.5 · 4(WWᵀ − I)W
    tensor([6., 6., 6., 6.])
    """
    chosen = find_layers(module, layers)
    return layers_penalty(chosen, [_buffer(layer, buffers) for layer in chosen], alpha)


def _buffer(layer: Layer, buffers: Mapping[nn.Parameter, Tensor]) -> Tensor | None:
    if not isinstance(layer.weight, nn.Parameter):
        raise SpclError(f"the weight of {layer.name!r} is computed from other parameters; use orthogonality_penalty")
    buffer = buffers.get(layer.weight)
    if buffer is None and layer.weight.requires_grad:
        raise SpclError(f"no buffer for the weight of {layer.name!r}; add one, or exclude the layer with `layers`")
    if buffer is not None and buffer.shape != layer.weight.shape:
        raise SpclError(
            f"the buffer for {layer.name!r} has shape {tuple(buffer.shape)}, but its weight {tuple(layer.weight.shape)}"
        )
    return buffer


class _Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: Layer) -> Tensor:
        gradient = torch.zeros_like(weight)
        ctx.save_for_backward(weight, gradient)
        return layer_penalty(layer, gradient)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None]:
        return _Gradient.apply(output_gradient, *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    # Not `once_differentiable`: it raises no error on double backward when the penalty itself is the loss.
    @staticmethod
    def forward(ctx: Any, output_gradient: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        return output_gradient * gradient

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Never:
        raise RuntimeError("the gradient of orthogonality_penalty is in closed form and cannot be differentiated again")


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
        target = None if gradient is None else gradient.view(layer.kernel_shape)
        return kernel_penalty(layer.kernel, layer.stride, target, alpha)


@torch.no_grad()
def layers_penalty(layers: Sequence[Layer], gradients: Sequence[Tensor | None], alpha: float = 1.0) -> Tensor:
    """Return the penalty of several layers, and add `alpha` times their gradients to `gradients` (None: none needed).

    On an accelerator, layers of one shape are one batch, because a few large kernels are faster than many small ones.
    On a CPU each layer is computed alone, which needs the least memory.

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
        kernels = _joined([layer.kernel for layer, _ in batch])
        if gradient is None:
            return kernel_penalty(kernels, layer.stride, None, alpha)
        found = torch.zeros_like(kernels)
        penalty = kernel_penalty(kernels, layer.stride, found, alpha)
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
