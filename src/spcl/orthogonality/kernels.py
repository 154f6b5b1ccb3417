"""The DBT penalty of one kernel and its gradient, by four exact methods."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import pi, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

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
