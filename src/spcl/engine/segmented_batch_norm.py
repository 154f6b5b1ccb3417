"""Batch-norm of several batches side by side, each with statistics of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spcl.engine.deferred import Followers
from spcl.engine.kernel_support import has_kernels
from spcl.engine.segments import SegmentGradients

__all__ = ["ImageNormalisation", "normalise_batches"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of images that kernels normalise, in float32."""


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


@dataclass(frozen=True, eq=False)
class ImageNormalisation:
    """Batch-norm of the images of several batches by few kernels on a GPU, together with what follows it.

    Attributes:
        x: the images.
        weight, bias: which scale and shift them.
        running: running mean and variance, or None.
        sizes: the numbers of images of the batches.
        momentum, eps: of batch-norm.
        target: receives the gradients of weight and bias.
    """

    x: Tensor
    weight: Any
    bias: Any
    running: tuple[Tensor, Tensor] | None
    sizes: Sequence[int]
    momentum: float
    eps: float
    target: SegmentGradients

    def __call__(self, followers: Followers) -> Tensor:
        """Return the result."""
        from spcl.engine.kernels.batch_norm import BatchNorm, BatchNormOptions

        follows = followers.relu, followers.pool
        add_gradients = partial(_add_gradients, self.target, self.weight, self.bias)  # which holds no images
        kept = add_gradients, self.target.segments.tables
        options = BatchNormOptions(tuple(self.sizes), self.momentum, self.eps, *follows, *kept)
        anchor = self.target.follow(self.weight, self.bias)
        parameters = self.weight, self.bias
        with torch.cuda.device_of(self.x):  # type: ignore[no-untyped-call]  # where Triton launches kernels
            return BatchNorm.apply(self.x, followers.addend, parameters, self.running, options, anchor)  # type: ignore[no-any-return, no-untyped-call]

    def has_kernels(self) -> bool:
        """Return whether there are kernels for all of it: for vectors without gaps, and batches of several pixels."""
        x, vectors = self.x, [self.weight, self.bias, *(self.running or ())]
        is_fit = all(vector.is_contiguous() and vector.shape == x.shape[1:2] for vector in vectors)
        return is_fit and has_kernels(x) and x.dtype in TYPES and min(self.sizes) * x.shape[2] * x.shape[3] > 1


def _add_gradients(target: SegmentGradients, weight: Any, bias: Any, of_weight: Tensor, of_bias: Tensor) -> None:
    target.add_by_batch(weight, of_weight)
    target.add_by_batch(bias, of_bias)
