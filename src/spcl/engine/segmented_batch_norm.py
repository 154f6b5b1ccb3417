"""Batch-norm of several batches side by side, each with statistics of its own."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spcl.engine.segments import SegmentGradients

__all__ = ["has_kernels", "normalise_batches", "normalise_images"]


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


def has_kernels(x: Tensor) -> bool:
    """Return whether there are kernels for such images: on a GPU, where Triton is installed."""
    return x.is_cuda and x.ndim == 4 and x.numel() < 2**31 and find_spec("triton") is not None


def normalise_images(
    x: Tensor,
    weight: Any,
    bias: Any,
    running: tuple[Tensor, Tensor] | None,
    sizes: Sequence[int],
    momentum: float,
    eps: float,
    *,
    relu: bool,
    target: SegmentGradients,
) -> Tensor:
    """Normalise the images of every batch, scale and shift them, with ReLU or without, by few kernels on a GPU."""
    from spcl.engine.batch_norm_kernels import BatchNorm

    def add_gradients(of_weight: Tensor, of_bias: Tensor) -> None:
        target.add_by_batch(weight, of_weight)
        target.add_by_batch(bias, of_bias)

    anchor = target.follow(weight, bias)
    return BatchNorm.apply(x, (weight, bias), running, tuple(sizes), momentum, eps, relu, add_gradients, anchor)  # type: ignore[no-any-return, no-untyped-call]
