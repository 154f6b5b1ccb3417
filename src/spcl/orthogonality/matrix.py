"""The penalty of kernels that never overlap a shifted copy of themselves: linear layers, 1×1 and patch convolutions."""

from torch import Tensor

__all__ = ["matrix_penalty"]


def matrix_penalty(kernel: Tensor, gradient: Tensor | None, alpha: float) -> Tensor:
    """‖KKᵀ − I‖² summed over the groups of a (groups, N, C) kernel; adds `alpha` · 4(KKᵀ − I)K to `gradient`.

    With N > C the same numbers come from the smaller KᵀK: ‖KKᵀ − I‖² = ‖KᵀK − I‖² + N − C and
    (KKᵀ − I)K = K(KᵀK − I).

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
