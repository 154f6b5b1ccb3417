"""The penalty of kernels with stride 1, in the frequency domain."""

from functools import cache
from itertools import product
from math import pi, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["spectral_penalty"]

CPU_CHUNK, ACCELERATOR_CHUNK = 2**20, 2**24
"""Most entries of K̂ computed at once: what fits a CPU cache, what keeps a GPU busy."""


def spectral_penalty(kernel: Tensor, gradient: Tensor | None, alpha: float) -> Tensor:
    """Return (1/L) Σ_ω ‖K̂(ω)K̂(ω)ᴴ − I‖² of a (groups, N, C, taps…) kernel: Σ_s ‖O_s − δ_s I‖² by Parseval.

    A transform of 2k − 1 points per dimension, L in all, is long enough that no shift wraps around.
    In real arithmetic, with K̂ = X + iY and K̂K̂ᴴ − I = R + iS, where R is symmetric and S antisymmetric, let
    T = R + S = (X + Y)Xᵀ + (Y − X)Yᵀ − I. Then ‖R + iS‖² = ‖T‖², and the gradient's (R + iS)(X + iY) takes
    three products, 2Z = (T + Tᵀ)(X + Y), TY and TᵀX: its real part is Z − TY and its imaginary part Z − TᵀX.
    The frequencies ω and −ω are conjugate, so half of them suffice.

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
