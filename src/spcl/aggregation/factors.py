"""Gradients of linear layers, kept as the factors of a product."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

CHUNKS = 6  # of the symmetric products of samples; the triangle of chunks is 7/12 of the square
NUMBERS_PER_PRODUCT = 20  # time to write and read a number, in multiply-adds of a matrix product (one CPU thread)
LEAST_GAIN = 10**7  # multiply-adds to save, at least, to outweigh the additional calls


class FactoredGradients:
    r"""T gradients :math:`G_t = L_t^\top R_t`, where L and R have one row per sample and t is a segment of the samples.

    The gradient of a linear layer's weight has this form: R holds the inputs, L the gradients of the outputs. The
    gradient of the bias has it, too, with ones for R. Inner products of gradients need only inner products of samples,
    :math:`\langle G_s, G_t \rangle = \sum_{a \in s, b \in t} (L_a \cdot L_b)(R_a \cdot R_b)`, and a weighted sum is one
    product. With few samples in a segment both take less time than with T matrices.

    Args:
        left: L.
        right: R; None for a column of ones, whose gradients are vectors.
        lengths: the number of samples of every segment.

    >>> left, right = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> gradients = FactoredGradients(left, right, (2, 1))
    >>> gradients.dense().flatten(1)
    tensor([[1., 2.],
            [1., 1.]])
    >>> factored_products([gradients])[0]
    tensor([[5., 3.],
            [3., 2.]], dtype=torch.float64)
    >>> gradients.weighted_sum(torch.tensor([1.0, 10.0]))
    tensor([[11., 12.]])
    """

    def __init__(self, left: Tensor, right: Tensor | None, lengths: Sequence[int]) -> None:
        self.left = left.detach() if left.requires_grad else left  # weight and bias of a layer share this tensor
        self.right = None if right is None else right.detach()
        self.lengths = tuple(lengths)
        self.dtype = left.dtype

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def are_faster(left: Tensor, right: Tensor, segments: int) -> bool:
        """Return whether inner products and weighted sums take less time with factors than with T matrices."""
        samples, height, width = len(left), left.shape[1], right.shape[1]
        dense = segments * (segments + NUMBERS_PER_PRODUCT) * height * width
        return samples**2 * (height + width) * (CHUNKS + 1) / (2 * CHUNKS) < dense - LEAST_GAIN

    @cached_property
    def segment(self) -> Tensor:
        """The segment of every sample."""
        places = torch.arange(len(self)).repeat_interleave(torch.tensor(self.lengths))
        return places.to(self.left.device, non_blocking=True)

    def segment_sums(self, values: Tensor, first: int, last: int) -> Tensor:
        """Sum values of pairs of samples, one of segments `first` to `last`, one of the same or a later segment."""
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
        if self.right is None:
            return torch.mv(self.left.T, by_sample, out=out)
        return torch.mm((self.left * by_sample.unsqueeze(1)).T, self.right, out=out)

    def dense(self) -> Tensor:
        """Return the gradients themselves."""
        lefts = torch.split_with_sizes(self.left, list(self.lengths))
        if self.right is None:
            return torch.stack([left.sum(dim=0) for left in lefts])
        rights = torch.split_with_sizes(self.right, list(self.lengths))
        return torch.stack([left.T @ right for left, right in zip(lefts, rights, strict=True)])


def doubled(factors: Sequence[FactoredGradients]) -> list[FactoredGradients]:
    """Return the gradients in float64; gradients that share a left factor still share it."""
    lefts = {id(each.left): each.left.double() for each in factors}
    rights = (None if each.right is None else each.right.double() for each in factors)
    pairs = zip(factors, rights, strict=True)
    return [FactoredGradients(lefts[id(each.left)], right, each.lengths) for each, right in pairs]


def factored_products(factors: Sequence[FactoredGradients]) -> tuple[Tensor, Tensor]:
    r"""Return the T×T inner products of the gradients of several parameters, and the scale of their rounding errors.

    Sums over samples are in float64. For parameters with the same samples, the products of samples are added up first,
    and a shared left factor is multiplied once. The scale is :math:`\sum_a |L_a|^2 |R_a|^2` over all parameters.
    """
    alike: dict[tuple[int, ...], list[FactoredGradients]] = {}
    for each in factors:
        alike.setdefault(each.lengths, []).append(each)
    found = [_products_alike(some) for some in alike.values()]
    products, scales = zip(*found, strict=True)
    return sum(products[1:], start=products[0]), sum(scales[1:], start=scales[0])


def _products_alike(factors: Sequence[FactoredGradients]) -> tuple[Tensor, Tensor]:
    """Return the products and the scale for parameters with the same samples."""
    one = factors[0]
    tasks, starts = len(one), [0, *accumulate(one.lengths)]
    products = one.left.new_empty(tasks, tasks, dtype=torch.float64)
    scale = products.new_zeros(())
    step = -(-tasks // CHUNKS)
    for first in range(0, tasks, step):
        last = min(first + step, tasks)
        values = _sample_products(factors, slice(starts[first], starts[last]))
        scale += values.diagonal().sum(dtype=torch.float64)
        part = one.segment_sums(values, first, last)
        products[first:last, first:] = part
        products[first:, first:last] = part.T
    return products, scale


def _sample_products(factors: Sequence[FactoredGradients], rows: slice) -> Tensor:
    """Return Σ (L_a · L_b)(R_a · R_b) over the parameters, for the samples a in `rows` and b from the first a on."""

    def inner(matrix: Tensor) -> Tensor:
        return matrix[rows] @ matrix[rows.start :].T

    lefts = {id(each.left): each.left for each in factors}
    of_left = {key: inner(left) for key, left in lefts.items()}
    total: Tensor | None = None
    for each in factors:
        left, right = of_left[id(each.left)], None if each.right is None else inner(each.right)
        if total is None:
            total = left.clone() if right is None else right.mul_(left)
        else:
            total = total.add_(left) if right is None else total.addcmul_(left, right)
    assert total is not None
    return total
