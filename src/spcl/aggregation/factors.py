"""Gradients of a matrix that are kept as the factors of a product."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["FactoredGradients"]

CHUNKS = 6  # of the symmetric products of samples; the triangle of chunks is 7/12 of the square
NUMBERS_PER_PRODUCT = 20  # time to write and read a number, in multiply-adds of a matrix product (one CPU thread)
LEAST_GAIN = 15 * 10**6  # multiply-adds that take longer than the additional calls


class FactoredGradients:
    r"""T gradients :math:`G_t = L_t^\top R_t`, where L and R have one row per sample and t is a segment of the samples.

    So is the gradient of a linear layer's weight, with the inputs R and the gradients L of the outputs. Inner products
    need those of the samples only, :math:`\langle G_s, G_t \rangle = \sum_{a \in s, b \in t} (L_a \cdot L_b)(R_a \cdot
    R_b)`, and a weighted sum is one product. With few samples in a segment both take less time than the T matrices do.

    Args:
        left: L.
        right: R.
        lengths: the number of samples of every segment.

    >>> left, right = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> gradients = FactoredGradients(left, right, (2, 1))
    >>> gradients.dense().flatten(1)
    tensor([[1., 2.],
            [1., 1.]])
    >>> gradients.products()[0]
    tensor([[5., 3.],
            [3., 2.]], dtype=torch.float64)
    >>> gradients.weighted_sum(torch.tensor([1.0, 10.0]))
    tensor([[11., 12.]])
    """

    def __init__(self, left: Tensor, right: Tensor, lengths: Sequence[int]) -> None:
        self.left = left.detach()
        self.right = right.detach()
        self.lengths = tuple(lengths)
        self.dtype = left.dtype

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def are_faster(left: Tensor, right: Tensor, segments: int) -> bool:
        """Return whether inner products and weighted sums of the factors take less time than those of the matrices."""
        samples, height, width = len(left), left.shape[1], right.shape[1]
        dense = segments * (segments + NUMBERS_PER_PRODUCT) * height * width
        return samples**2 * (height + width) * (CHUNKS + 1) / (2 * CHUNKS) < dense - LEAST_GAIN

    @cached_property
    def segment(self) -> Tensor:
        """The segment of every sample."""
        places = torch.arange(len(self)).repeat_interleave(torch.tensor(self.lengths))
        return places.to(self.left.device, non_blocking=True)

    def double(self) -> "FactoredGradients":
        """Return the gradients in float64."""
        return FactoredGradients(self.left.double(), self.right.double(), self.lengths)

    def products(self) -> tuple[Tensor, Tensor]:
        r"""Return the T×T inner products, summed over samples in float64, and the scale of their rounding errors.

        That is :math:`\sum_a |L_a|^2 |R_a|^2`.
        """
        products = self.left.new_empty(len(self), len(self), dtype=torch.float64)
        scale = products.new_zeros(())
        starts = [0, *accumulate(self.lengths)]
        step = -(-len(self) // CHUNKS)
        for first in range(0, len(self), step):
            last = min(first + step, len(self))
            rows = slice(starts[first], starts[last])
            left, right = (each[rows] @ each[rows.start :].T for each in (self.left, self.right))
            values = left.mul_(right)
            scale += values.diagonal().sum(dtype=torch.float64)
            part = self._sums(values, first, last)
            products[first:last, first:] = part
            products[first:, first:last] = part.T
        return products, scale

    def _sums(self, values: Tensor, first: int, last: int) -> Tensor:
        """Sum values of the samples of some segments with those of the same and all later segments."""
        lengths = self.lengths[first:]
        if len(set(lengths)) == 1:
            of_rows = values.view(last - first, lengths[0], -1).sum(dim=1)
            return of_rows.view(last - first, len(lengths), -1).sum(dim=2, dtype=torch.float64)
        segment = self.segment[-values.shape[1] :] - first
        sums = values.new_zeros(len(values), len(lengths), dtype=torch.float64).index_add_(1, segment, values.double())
        return sums.new_zeros(last - first, len(lengths)).index_add_(0, segment[: len(values)], sums)

    def weighted_sum(self, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the sum of the gradients, each times its weight; ``out`` receives it, if given."""
        weights = weights.to(self.dtype)
        if len(set(self.lengths)) == 1:
            by_sample = weights.unsqueeze(1).expand(-1, self.lengths[0]).reshape(-1)
        else:
            by_sample = weights[self.segment]
        return torch.mm((self.left * by_sample.unsqueeze(1)).T, self.right, out=out)

    def dense(self) -> Tensor:
        """Return the gradients themselves."""
        parts = (torch.split_with_sizes(each, list(self.lengths)) for each in (self.left, self.right))
        return torch.stack([left.T @ right for left, right in zip(*parts, strict=True)])
