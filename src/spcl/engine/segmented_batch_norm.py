"""Batch-norm of several batches side by side, each with statistics of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["normalise_batches"]


def normalise_batches(
    x: Tensor, running: tuple[Tensor, Tensor] | None, sizes: Sequence[int], momentum: float, eps: float
) -> Tensor:
    """Normalise every batch by its mean and variance; update the running averages batch after batch.

    >>> x = torch.tensor([[1.0], [3.0], [10.0], [30.0]])
    >>> mean, variance = torch.zeros(1), torch.ones(1)
    >>> normalise_batches(x, (mean, variance), (2, 2), momentum=0.5, eps=1e-9).T
    tensor([[-1.,  1., -1.,  1.]])
    >>> mean, variance
    (tensor([10.5000]), tensor([100.7500]))
    """
    mean, variance = running or (None, None)
    parts = torch.split_with_sizes(x, list(sizes))
    return torch.cat([functional.batch_norm(part, mean, variance, None, None, True, momentum, eps) for part in parts])
