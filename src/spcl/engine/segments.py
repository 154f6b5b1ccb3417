"""The batches of a pass over several of them, and the gradients of each as rows of the gradient matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

import torch
from torch import Tensor, nn

from spcl.aggregation.factors import FactoredGradients
from spcl.engine.gradients import GradientMatrix

__all__ = ["SegmentGradients", "Segments", "UnsupportedError"]


class UnsupportedError(Exception):
    """A network whose gradients cannot be computed segment by segment; the message says why."""


@dataclass(frozen=True)
class Segments:
    """The batches that one pass covers, side by side.

    Consecutive batches whose gradients share a row are one segment; batch-norm sees the batches.

    Attributes:
        sizes: the number of samples of every batch.
        targets: the row of every batch's gradient.

    >>> segments = Segments((8, 8, 4), (0, 0, 1))
    >>> segments.samples, segments.rows, segments.lengths
    (20, (0, 1), (16, 4))
    """

    sizes: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, sizes: tuple[int, ...], targets: tuple[int, ...]) -> "Segments":
        """Return segments, of which those of recent steps are kept."""
        return cls(sizes, targets)

    @cached_property
    def samples(self) -> int:
        """The number of samples in all."""
        return sum(self.sizes)

    @cached_property
    def _parts(self) -> list[tuple[int, int]]:
        pairs = zip(self.targets, self.sizes, strict=True)
        return [(row, sum(size for _, size in group)) for row, group in groupby(pairs, key=lambda pair: pair[0])]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The row of every segment."""
        return tuple(row for row, _ in self._parts)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of samples of every segment."""
        return tuple(length for _, length in self._parts)

    @cached_property
    def are_equal(self) -> bool:
        """Whether all segments have the same length and their rows follow one another."""
        first = self.rows[0]
        return len(set(self.lengths)) == 1 and self.rows == tuple(range(first, first + len(self.rows)))

    def multiple(self, tensor: Tensor) -> int:
        """Return how many rows of the tensor belong to a sample, whose rows must follow one another."""
        count = len(tensor) if tensor.ndim else 0
        if count % self.samples or not count:
            raise UnsupportedError(
                f"a tensor of shape {tuple(tensor.shape)} has not the {self.samples} samples in its first dimension"
            )
        return count // self.samples


class SegmentGradients:
    """Writes the gradients of the segments of one pass, parameter by parameter, into the rows of the gradient matrix.

    Args:
        gradients: the gradient matrix.
        segments: of the pass.
        fresh: whether the rows hold nothing yet, and every row of the step belongs to this pass.
    """

    def __init__(self, gradients: GradientMatrix, segments: Segments, fresh: bool) -> None:
        self.segments = segments
        self._gradients = gradients
        self._blocks = gradients.blocks
        self._unwritten = set(gradients.parameters) if fresh else set()

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, nn.Parameter) and parameter in self._blocks

    def add_products(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add ``leftᵀ right`` of every segment to its gradient of a matrix."""
        if parameter not in self:
            return
        segments, multiple = self.segments, self.segments.multiple(left)
        block, is_new = self._block(parameter), self._is_new(parameter)
        lengths = [length * multiple for length in segments.lengths]
        if is_new and self._gradients.keeps_factors and FactoredGradients.are_faster(left, right, len(lengths)):
            self._gradients.factors[parameter] = FactoredGradients(left, right, lengths)
            return
        if segments.are_equal and left.dtype == block.dtype:
            rows = block[segments.rows[0] : segments.rows[-1] + 1]
            left, right = (each.reshape(len(rows), -1, each.shape[1]) for each in (left, right))
            if is_new:
                torch.bmm(left.transpose(1, 2), right, out=rows)
            else:
                torch.baddbmm(rows, left.transpose(1, 2), right, out=rows)
            return
        products = (a.T @ b for a, b in zip(left.split(lengths), right.split(lengths), strict=True))
        self._add(block, products, is_new)

    def add_sums(self, parameter: nn.Parameter | None, values: Tensor, shape: Sequence[int]) -> None:
        """Add the sum of every segment's values, which were broadcast from this shape of the parameter's, to it."""
        if parameter is None or parameter not in self:
            return
        segments, multiple = self.segments, self.segments.multiple(values)
        aligned = (1,) * (values.ndim - len(shape)) + tuple(shape)
        values = values.sum_to_size(len(values), *aligned[1:]).reshape(len(values), -1)
        if segments.are_equal:
            sums = values.view(len(segments.rows), -1, values.shape[1]).sum(dim=1)
        else:
            parts = values.split([length * multiple for length in segments.lengths])
            sums = torch.stack([part.sum(dim=0) for part in parts])
        self.add(parameter, sums.view(-1, *parameter.shape))

    def add(self, parameter: nn.Parameter, values: Tensor | Sequence[Tensor]) -> None:
        """Add one tensor per segment to the gradients of a parameter."""
        if parameter in self:
            self._add(self._block(parameter), values, self._is_new(parameter))

    def finish(self) -> None:
        """Set the gradients of parameters that took no part to zero."""
        for parameter in self._unwritten:
            self._blocks[parameter][: self._gradients.plan.rows].zero_()

    def _block(self, parameter: nn.Parameter) -> Tensor:
        return self._blocks[parameter]

    def _is_new(self, parameter: nn.Parameter) -> bool:
        """Return whether nothing was written for the parameter, and note that something is."""
        if (factors := self._gradients.factors.pop(parameter, None)) is not None:
            self._blocks[parameter][: len(factors)].copy_(factors.dense())
        is_new = parameter in self._unwritten
        self._unwritten.discard(parameter)
        return is_new

    def _add(self, block: Tensor, values: Tensor | Sequence[Tensor], is_new: bool) -> None:
        segments = self.segments
        if isinstance(values, Tensor) and segments.are_equal:
            rows = block[segments.rows[0] : segments.rows[-1] + 1]
            (rows.copy_ if is_new else rows.add_)(values)
            return
        for row, value in zip(segments.rows, values, strict=True):
            (block[row].copy_ if is_new else block[row].add_)(value)
