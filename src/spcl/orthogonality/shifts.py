"""The penalty of strided kernels, shift by shift."""

from collections.abc import Iterator, Sequence
from itertools import product

from torch import Tensor

__all__ = ["shift_penalty"]


def shift_penalty(kernel: Tensor, stride: Sequence[int], gradient: Tensor | None, alpha: float) -> Tensor:
    """Return Σ_s ‖O_s − δ_s I‖² over the shifts s that are multiples of the stride, for a (groups, N, C, taps…) kernel.

    O_s = A Bᵀ, where A and B are the parts of the kernel that overlap with a copy shifted by s, flattened to N rows.
    As O_{−s} = O_sᵀ half of the shifts suffice, and each adds 4 O_s B to the gradient at A and 4 O_sᵀ A at B.

    >>> import torch
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
            _add(target[ahead], correlation @ b, 4 * alpha)
            if ahead != behind:
                _add(target[behind], correlation.mT @ a, 4 * alpha)
    return penalty


def _add(target: Tensor, product: Tensor, factor: float) -> None:
    target.add_(product.view(target.shape), alpha=factor)


def _overlaps(sizes: Sequence[int], stride: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the overlapping taps at p + s and at p, for s = 0 and one of each pair ±s."""
    reach = [(size - 1) // step * step for size, step in zip(sizes, stride, strict=True)]
    everything = (slice(None), slice(None))
    for shift in product(*(range(-r, r + 1, step) for r, step in zip(reach, stride, strict=True))):
        if shift >= (0,) * len(shift):
            ahead = (slice(max(s, 0), size + min(s, 0)) for s, size in zip(shift, sizes, strict=True))
            behind = (slice(max(-s, 0), size - max(s, 0)) for s, size in zip(shift, sizes, strict=True))
            yield (*everything, *ahead), (*everything, *behind)
