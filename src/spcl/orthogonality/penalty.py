"""The DBT penalty of the layers of a module: as a differentiable loss, or as a gradient added to buffers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, product
from math import pi, prod
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from spcl.errors import SpclError
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


# -- one kernel, by four exact methods

CPU_CHUNK, ACCELERATOR_CHUNK = 2**20, 2**24
"""The most entries of K̂ to compute at once: they fit a CPU's cache, and keep a GPU busy."""


def kernel_penalty(kernel: Tensor, stride: Sequence[int], gradient: Tensor | None, alpha: float) -> Tensor:
    """Return Σ_s ‖O_s − δ_s I‖² over the shifts s that are multiples of the stride, by the cheapest method.

    Args:
        kernel: the weight of a convolution, (groups, N, C, taps…), with N filters and C channels per group.
        stride: the distance of neighbouring outputs, in taps.
        gradient: receives `alpha` times the gradient, which is added to it; None if no gradient is needed.
        alpha: the factor of the gradient.

    >>> kernel_penalty(torch.ones(1, 1, 1, 3), [1], None, 1.0)  # O_0 = 3, O_±1 = 2 and O_±2 = 1
    tensor(14.)
    """
    if all(size <= step for size, step in zip(kernel.shape[3:], stride, strict=True)):
        return matrix_penalty(kernel.flatten(2), gradient, alpha)
    if all(step == 1 for step in stride):
        return spectral_penalty(kernel, gradient, alpha)
    strided = shift_penalty if kernel.device.type == "cpu" else phase_penalty
    return strided(kernel, stride, gradient, alpha)


def matrix_penalty(kernel: Tensor, gradient: Tensor | None, alpha: float) -> Tensor:
    """Return ‖KKᵀ − I‖² summed over the groups of a (groups, N, C) kernel; add `alpha` · 4(KKᵀ − I)K to `gradient`.

    For N > C the smaller KᵀK gives the same: ‖KKᵀ − I‖² = ‖KᵀK − I‖² + N − C and (KKᵀ − I)K = K(KᵀK − I).

    >>> matrix_penalty(torch.ones(1, 2, 1), None, 1.0)
    tensor(2.)
    """
    groups, rows, columns = kernel.shape
    tall = rows > columns
    excess = kernel.mT @ kernel if tall else kernel @ kernel.mT
    excess.diagonal(dim1=1, dim2=2).sub_(1)
    if gradient is not None:
        slope = kernel @ excess if tall else excess @ kernel
        gradient.add_(slope.view(gradient.shape), alpha=4 * alpha)
    return excess.square().sum() + groups * max(rows - columns, 0)


def spectral_penalty(kernel: Tensor, gradient: Tensor | None, alpha: float) -> Tensor:
    """Return (1/L) Σ_ω ‖K̂(ω)K̂(ω)ᴴ − I‖² of a (groups, N, C, taps…) kernel: Σ_s ‖O_s − δ_s I‖² by Parseval.

    With 2k − 1 points per dimension, L in all, the transform is long enough that no shift wraps around.
    In real arithmetic, with K̂ = X + iY and K̂K̂ᴴ − I = R + iS, where R is symmetric and S antisymmetric, let
    T = R + S = (X + Y)Xᵀ + (Y − X)Yᵀ − I. Then ‖R + iS‖² = ‖T‖², and the gradient's (R + iS)(X + iY) takes
    three products, 2Z = (T + Tᵀ)(X + Y), TY and TᵀX: its real part is Z − TY and its imaginary part Z − TᵀX.
    K̂ at ω and at −ω are conjugate, so half of the frequencies suffice.

    For N > C the smaller K̂ᴴK̂ is used: ‖K̂K̂ᴴ − I‖² = ‖K̂ᴴK̂ − I‖² + N − C.

    >>> spectral_penalty(torch.ones(1, 1, 1, 2), None, 1.0)  # O_0 = 2 and O_±1 = 1
    tensor(3.)
    """
    groups, rows, columns, *sizes = kernel.shape
    if rows > columns:
        swapped = None if gradient is None else gradient.transpose(1, 2)
        return spectral_penalty(kernel.transpose(1, 2), swapped, alpha) + groups * (rows - columns)
    count = prod(sizes)
    taps = pad(kernel.flatten(3).movedim(-1, 0).reshape(count, -1), (0, 0, 0, _missing(count)))
    tap_gradient = taps.new_zeros(count, taps.shape[1])
    penalty = kernel.new_zeros(())
    chunk = CPU_CHUNK if kernel.device.type == "cpu" else ACCELERATOR_CHUNK
    frequencies = max(1, chunk // (groups * rows * columns))
    for analysis, synthesis, weights in _waves(tuple(sizes), frequencies, kernel.dtype, kernel.device):
        x, y, x_plus_y, y_minus_x = (analysis @ taps).view(4, -1, rows, columns)
        t = torch.bmm(x_plus_y, x.mT).baddbmm_(y_minus_x, y.mT)
        t.diagonal(dim1=1, dim2=2).sub_(1)
        penalty += weights @ torch.linalg.vector_norm(t.view(len(weights), -1), dim=1).square()
        if gradient is not None:
            flat = taps.new_empty(synthesis.shape[1], taps.shape[1])
            products = flat[: 3 * len(weights)].view(3, *x.shape)
            flat[3 * len(weights) :] = 0
            torch.bmm(t + t.mT, x_plus_y, out=products[0])
            torch.bmm(t, y, out=products[1])
            torch.bmm(t.mT, x, out=products[2])
            tap_gradient.addmm_(synthesis, flat)
    if gradient is not None:
        gradient.add_(tap_gradient.T.view(kernel.shape), alpha=4 * alpha)
    return penalty


@cache  # unbounded: CUDA graphs hold their addresses
def _waves(
    sizes: tuple[int, ...], frequencies: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for each chunk of frequencies the maps from taps to (X, Y, X + Y, Y − X) and back, and the weights."""
    lengths = [2 * size - 1 for size in sizes]
    origin = (0,) * len(sizes)
    waves = [wave for wave in product(*(range(-size + 1, size) for size in sizes)) if wave >= origin]
    positions = torch.tensor(list(product(*map(range, sizes))), dtype=torch.float64)
    angles = 2 * pi * torch.tensor(waves, dtype=torch.float64) / torch.tensor(lengths) @ positions.T
    weights = torch.tensor([1 if wave == origin else 2 for wave in waves], dtype=torch.float64) / prod(lengths)
    chunks = []
    for angle, weight in zip(torch.split(angles, frequencies), torch.split(weights, frequencies), strict=True):
        c, s = angle.cos(), angle.sin()
        analysis = torch.cat([c, s, c + s, s - c])
        synthesis = torch.cat([(c + s) / 2, -c, -s]).T * weight.repeat(3)
        padded = [pad(matrix, (0, _missing(matrix.shape[1]))) for matrix in (analysis, synthesis)]
        chunks.append((padded[0].to(device, dtype), padded[1].to(device, dtype), weight.to(device, dtype)))
    return chunks


def _missing(count: int) -> int:
    """Return the padding to a multiple of 4, which fast matrix products on a GPU require."""
    return -count % 4


def shift_penalty(kernel: Tensor, stride: Sequence[int], gradient: Tensor | None, alpha: float) -> Tensor:
    """Return Σ_s ‖O_s − δ_s I‖² over the shifts s that are multiples of the stride, for a (groups, N, C, taps…) kernel.

    O_s = A Bᵀ, where A and B are the parts of the kernel that overlap with a copy shifted by s, flattened to N rows.
    As O_{−s} = O_sᵀ half of the shifts suffice, and each adds 4 O_s B to the gradient at A and 4 O_sᵀ A at B.

    >>> shift_penalty(torch.ones(1, 1, 1, 3), [2], None, 1.0)  # O_0 = 3 and O_±2 = 1
    tensor(6.)
    """
    taps = kernel.movedim(2, -1).contiguous()  # channels last: the parts of a kernel are cheap to flatten
    target = None if gradient is None else gradient.movedim(2, -1)
    penalty = kernel.new_zeros(())
    for ahead, behind in _overlaps(kernel.shape[3:], stride):
        a, b = taps[ahead].flatten(2), taps[behind].flatten(2)
        correlation = a @ b.mT
        if ahead == behind:
            correlation.diagonal(dim1=1, dim2=2).sub_(1)
        penalty += correlation.square().sum() * (1 if ahead == behind else 2)
        if target is not None:
            target[ahead].add_((correlation @ b).view(target[ahead].shape), alpha=4 * alpha)
            if ahead != behind:
                target[behind].add_((correlation.mT @ a).view(target[behind].shape), alpha=4 * alpha)
    return penalty


def _overlaps(sizes: Sequence[int], stride: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the overlapping taps at p + s and at p, for s = 0 and one of each pair ±s."""
    reach = [(size - 1) // step * step for size, step in zip(sizes, stride, strict=True)]
    everything = (slice(None), slice(None))
    for shift in product(*(range(-r, r + 1, step) for r, step in zip(reach, stride, strict=True))):
        if shift >= (0,) * len(shift):
            ahead = (slice(max(s, 0), size + min(s, 0)) for s, size in zip(shift, sizes, strict=True))
            behind = (slice(max(-s, 0), size - max(s, 0)) for s, size in zip(shift, sizes, strict=True))
            yield (*everything, *ahead), (*everything, *behind)


def phase_penalty(kernel: Tensor, stride: Sequence[int], gradient: Tensor | None, alpha: float) -> Tensor:
    """Return Σ_s ‖O_s − δ_s I‖² over the shifts s that are multiples of the stride, for a (groups, N, C, taps…) kernel.

    Taps that overlap under such shifts are a multiple of the stride S apart. So a kernel of stride S equals a kernel of
    stride 1 whose channels are the pairs of a channel and a phase p mod S. For a 3×3 kernel of stride 2, padded with
    zeros to 4×4, this takes twice the operations of :func:`shift_penalty` in a third of the kernel launches.

    >>> phase_penalty(torch.ones(1, 1, 1, 3), [2], None, 1.0)  # O_0 = 3 and O_±2 = 1
    tensor(6.)
    """
    missing = [-size % step for size, step in zip(kernel.shape[3:], stride, strict=True)]
    padded = pad(kernel, [amount for last in reversed(missing) for amount in (0, last)])
    counts = [size // step for size, step in zip(padded.shape[3:], stride, strict=True)]
    first = range(3, 3 + 2 * len(stride), 2)
    order = [0, 1, 2, *(axis + 1 for axis in first), *first]  # the phases follow the channels, then the taps of a phase
    by_phase = padded.view(*kernel.shape[:3], *(n for pair in zip(counts, stride, strict=True) for n in pair))
    phases = by_phase.permute(order).reshape(*kernel.shape[:2], kernel.shape[2] * prod(stride), *counts)
    if gradient is None:
        return spectral_penalty(phases, None, alpha)
    found = phases.new_zeros(phases.shape)
    penalty = spectral_penalty(phases, found, alpha)
    back = [order.index(axis) for axis in range(len(order))]
    taps = found.view(*kernel.shape[:3], *stride, *counts).permute(back).reshape(padded.shape)
    for axis, size in enumerate(kernel.shape[3:], start=3):
        taps = taps.narrow(axis, 0, size)
    gradient.add_(taps)
    return penalty
