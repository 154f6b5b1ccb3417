"""The penalty of kernels no larger than their stride: linear layers, 1×1 and patch convolutions."""

from torch import Tensor

__all__ = ["matrix_penalty"]


def matrix_penalty(kernel: Tensor, gradient: Tensor | None, alpha: float) -> Tensor:
    """Return ‖KKᵀ − I‖² summed over the groups of a (groups, N, C) kernel; add `alpha` · 4(KKᵀ − I)K to `gradient`.

    For N > C the smaller KᵀK gives the same: ‖KKᵀ − I‖² = ‖KᵀK − I‖² + N − C and (KKᵀ − I)K = K(KᵀK − I).

    >>> import torch
    >>> matrix_penalty(torch.ones(1, 2, 1), None, 1.0)
    tensor(2.)
    """
    groups, rows, columns = kernel.shape
    tall = rows > columns
    excess = kernel.mT @ kernel if tall else kernel @ kernel.mT
    excess.diagonal(dim1=1, dim2=2).sub_(1)
    if gradient is not None:
        product = kernel @ excess if tall else excess @ kernel
        gradient.add_(product.view(gradient.shape), alpha=4 * alpha)
    return excess.square().sum() + groups * max(rows - columns, 0)
