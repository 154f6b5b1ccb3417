"""The penalty of strided kernels in a few large products, for accelerators."""

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.nn.functional import pad

from spcl.orthogonality.spectral import spectral_penalty

__all__ = ["phase_penalty"]


def phase_penalty(kernel: Tensor, stride: Sequence[int], gradient: Tensor | None, alpha: float) -> Tensor:
    """Return Σ_s ‖O_s − δ_s I‖² over the shifts s that are multiples of the stride, for a (groups, N, C, taps…) kernel.

    Taps that overlap under such shifts are a multiple of the stride S apart, so a kernel of stride S is one of stride 1
    whose channels are the pairs of a channel and a phase p mod S. For a 3×3 kernel of stride 2, padded with zeros to
    4×4, that takes twice the operations of :func:`~spcl.orthogonality.shifts.shift_penalty` in a third of the launches.

    >>> import torch
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
