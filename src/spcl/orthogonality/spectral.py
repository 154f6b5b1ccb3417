"""The penalty of kernels with stride 1, frequency by frequency."""

from functools import lru_cache
from itertools import product
from math import pi, prod

import torch
from torch import Tensor

__all__ = ["spectral_penalty"]

CPU_CHUNK, ACCELERATOR_CHUNK = 2**20, 2**24
"""How many numbers K̂ may have at the frequencies treated together: what a cache holds, what keeps a GPU busy."""


def spectral_penalty(kernel: Tensor, gradient: Tensor | None, alpha: float) -> Tensor:
    """(1/L) Σ_ω ‖K̂(ω)K̂(ω)ᴴ − I‖² of a (groups, N, C, taps…) kernel, which is Σ_s ‖O_s − δ_s I‖² by Parseval.

    A transform of 2k − 1 points a dimension, L in all, is long enough for shifts never to wrap around.
    In real arithmetic, with K̂ = X + iY and K̂K̂ᴴ − I = R + iS, where R is symmetric and S antisymmetric, all is in
    T = R + S = (X + Y)Xᵀ + (Y − X)Yᵀ − I: ‖R + iS‖² = ‖T‖², and the gradient's (R + iS)(X + iY) takes
    three products, 2Z = (T + Tᵀ)(X + Y), TY and TᵀX, as its real part is Z − TY and its imaginary part Z − TᵀX.
    The frequencies ω and −ω are conjugate, so that half of them suffice.

    With N > C the smaller K̂ᴴK̂ is used: ‖K̂K̂ᴴ − I‖² = ‖K̂ᴴK̂ − I‖² + N − C.

    >>> spectral_penalty(torch.ones(1, 1, 1, 2), None, 1.0)  # O_0 = 2 and O_±1 = 1
    tensor(3.)
    """
    groups, rows, columns, *sizes = kernel.shape
    if rows > columns:
        swapped = None if gradient is None else gradient.transpose(1, 2)
        return spectral_penalty(kernel.transpose(1, 2), swapped, alpha) + groups * (rows - columns)
    taps = kernel.flatten(3).movedim(-1, 0).reshape(prod(sizes), -1)
    tap_gradient = taps.new_zeros(taps.shape)
    penalty = kernel.new_zeros(())
    chunk = CPU_CHUNK if kernel.device.type == "cpu" else ACCELERATOR_CHUNK
    frequencies = max(1, chunk // (groups * rows * columns))
    for analysis, synthesis, weights in _waves(tuple(sizes), frequencies, kernel.dtype, kernel.device):
        x, y, x_plus_y, y_minus_x = (analysis @ taps).view(4, -1, rows, columns)
        t = torch.bmm(x_plus_y, x.mT).baddbmm_(y_minus_x, y.mT)
        t.diagonal(dim1=1, dim2=2).sub_(1)
        penalty += weights @ t.square().view(len(weights), -1).sum(1)
        if gradient is not None:
            products = x.new_empty(3, *x.shape)
            torch.bmm(t, y, out=products[1])
            torch.bmm(t.mT, x, out=products[2])
            torch.bmm(t + t.mT, x_plus_y, out=products[0])
            tap_gradient.addmm_(synthesis, products.view(synthesis.shape[1], -1))
    if gradient is not None:
        gradient.add_(tap_gradient.T.view(kernel.shape), alpha=4 * alpha)
    return penalty


@lru_cache(maxsize=64)
def _waves(
    sizes: tuple[int, ...], frequencies: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For every chunk of frequencies: taps to X, Y, X + Y, Y − X; 2Z, TY, TᵀX to taps; the weight of each frequency."""
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
        chunks.append((_aligned(analysis, dtype, device), _aligned(synthesis, dtype, device), weight.to(device, dtype)))
    return chunks


def _aligned(matrix: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The matrix with rows that begin at multiples of 16 bytes, which the fast products of a GPU ask for."""
    rows, columns = matrix.shape
    return torch.empty(rows, columns + -columns % 4, dtype=dtype, device=device)[:, :columns].copy_(matrix)
