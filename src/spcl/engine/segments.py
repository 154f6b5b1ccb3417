"""The batches of a pass over several of them, and the gradients of each as rows of the gradient matrix."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from spcl.aggregation.factors import FactoredGradients
from spcl.engine.gradients import GradientMatrix
from spcl.engine.side_streams import SideStreams

__all__ = ["SegmentGradients", "Segments", "UnsupportedError", "Work"]

MOST_CLEARED = 1 << 21
"""Numbers that stay in a CPU's cache once they are cleared; a product that overwrites them clears them more slowly."""

Work = Callable[..., Tensor]
"""Computes the gradient of a parameter, or that of a slice of its first dimension if one is given."""


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

    def __post_init__(self) -> None:
        if min(self.sizes, default=0) < 1 or len(set(self.rows)) < len(self.rows):
            raise UnsupportedError(f"batches of {self.sizes} samples cannot be added to the rows {self.targets}")

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

    @cached_property
    def batches_per_segment(self) -> tuple[int, ...]:
        """The number of batches of every segment."""
        return tuple(len(list(group)) for _, group in groupby(self.targets))

    @cached_property
    def index_in_segment(self) -> tuple[int, ...]:
        """The index of every batch in its segment."""
        return tuple(index for count in self.batches_per_segment for index in range(count))

    @cached_property
    def tables(self) -> dict[object, Any]:
        """What kernels have noted of these batches, by a key of theirs: it lives as long as graphs that read it."""
        return {}

    def multiple(self, tensor: Tensor) -> int:
        """Return how many rows of the tensor belong to a sample, whose rows must follow one another."""
        count = tensor.shape[0] if tensor.ndim else 0
        if count % self.samples or not count:
            raise UnsupportedError(
                f"a tensor of shape {tuple(tensor.shape)} has not the {self.samples} samples in its first dimension"
            )
        return count // self.samples

    def places(self, device: torch.device) -> Tensor:
        """Return the segment of every sample."""
        key = "places", device
        if key not in self.tables:
            places = torch.arange(len(self.rows)).repeat_interleave(torch.tensor(self.lengths))
            self.tables[key] = places.to(device)
        kept: Tensor = self.tables[key]
        return kept

    def lengths_in(self, tensor: Tensor) -> tuple[int, ...]:
        """Return how many rows of the tensor belong to every segment."""
        multiple = self.multiple(tensor)
        return self.lengths if multiple == 1 else tuple(multiple * length for length in self.lengths)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the part of every segment."""
        return torch.split_with_sizes(tensor, self.lengths_in(tensor))


class SegmentGradients:
    """Writes the gradients of the segments of one pass, parameter by parameter, into the rows of the gradient matrix.

    Args:
        gradients: the gradient matrix.
        segments: of the pass.
        fresh: whether the rows hold nothing yet, and every row of the step belongs to this pass.

    Attributes:
        segments: as given.
    """

    def __init__(self, gradients: GradientMatrix, segments: Segments, fresh: bool) -> None:
        self._gradients = gradients
        self._unwritten = set(gradients.parameters) if fresh else set()
        self._late: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._converted: dict[torch.dtype, dict[nn.Parameter, Tensor]] = {}
        self._use(segments)

    def _use(self, segments: Segments) -> None:
        self.segments = segments
        first, last = segments.rows[0], segments.rows[-1]
        self._range = slice(first, last + 1) if segments.are_equal else None

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, nn.Parameter) and parameter in self._gradients.blocks

    def follow(self, *parameters: Tensor | None) -> Tensor:
        """Note a use of parameters; return the tensor that autograd follows in their place, which gets no gradient."""
        return self._gradients.anchor

    def converted(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight in another type; those of all convolutions are converted by one kernel."""
        if not isinstance(weight, nn.Parameter) or weight not in self or weight.ndim < 3:
            return weight.to(dtype)
        if dtype not in self._converted:
            weights = [each.detach() for each in self._gradients.parameters if each.ndim > 2]
            copies = [torch.empty_like(each, dtype=dtype) for each in weights]
            torch._foreach_copy_(copies, weights)
            parameters = (each for each in self._gradients.parameters if each.ndim > 2)
            self._converted[dtype] = dict(zip(parameters, copies, strict=True))
        return self._converted[dtype][weight]

    def add_products(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add ``leftᵀ right`` of every segment to its gradient of a matrix."""
        if parameter not in self:
            return
        lengths = self.segments.lengths_in(left)
        block, is_new = self._block(parameter)
        is_direct, may_factor = left.dtype == block.dtype, is_new and self._gradients.keeps_factors
        if is_direct and may_factor and FactoredGradients.are_faster(left, right, len(lengths)):
            self._gradients.factors[parameter] = FactoredGradients(left, right, lengths)
        elif is_direct and self._range is not None:
            rows = block[self._range]
            left, right = (each.reshape(len(lengths), -1, each.shape[1]) for each in (left, right))
            if is_new and not (rows.is_cpu and rows.numel() <= MOST_CLEARED):
                torch.bmm(left.transpose(1, 2), right, out=rows)
            else:
                (rows.zero_() if is_new else rows).baddbmm_(left.transpose(1, 2), right)
        else:
            parts = zip(*(torch.split_with_sizes(each, lengths) for each in (left, right)), strict=True)
            self._add(block, (one.T @ other for one, other in parts), is_new)

    def add_sums(self, parameter: nn.Parameter | None, values: Tensor, shape: Sequence[int]) -> None:
        """Add the sum of every segment's values, which were broadcast from this shape of the parameter's, to it."""
        if parameter is None or parameter not in self or self._kept_as_factor(parameter, values):
            return
        if values.ndim > 2:
            aligned = ((1,) * (values.ndim - len(shape)) + tuple(shape))[1:]
            values = values.sum_to_size(len(values), *aligned).reshape(len(values), -1)
        if self._range is None:
            sums = torch.stack([part.sum(dim=0) for part in self.segments.split(values)])
        else:
            values = values.reshape(len(self.segments.rows), -1, values.shape[1])
            if parameter in self._unwritten and parameter.ndim == 1 and parameter.dtype == values.dtype:
                torch.sum(values, dim=1, out=self._block(parameter)[0][self._range])
                return
            sums = values.sum(dim=1)
        self.add(parameter, sums.view(-1, *parameter.shape))

    def _kept_as_factor(self, parameter: nn.Parameter, values: Tensor) -> bool:
        """Keep sums as a factor where it is kept already, for the layer's weight; return whether they are."""
        factors = self._gradients.factors
        kept = next((each for each in factors.values() if each.left is values), None)
        if kept is None or parameter not in self._unwritten:
            return False
        self._unwritten.discard(parameter)
        factors[parameter] = FactoredGradients(values, None, kept.lengths)
        return True

    def add(self, parameter: nn.Parameter, values: Tensor | Iterable[Tensor]) -> None:
        """Add one tensor per segment to the gradients of a parameter."""
        if parameter in self:
            block, is_new = self._block(parameter)
            self._add(block, values, is_new)

    def add_from(
        self, parameter: nn.Parameter, works: Iterable[Work], streams: SideStreams, separable: bool = True
    ) -> None:
        """Add what a piece of work per segment computes to the gradients of a parameter.

        Work that is separable can also compute a part of the gradient, that of a slice of the parameter.
        """
        block, is_new = self._block(parameter)
        for row, work in zip(self.segments.rows, works, strict=True):
            streams.run(partial(_store, block[row], work, is_new))

    def claim_rows(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's columns, which the caller must write, or None where they hold something already."""
        return self._block(parameter)[0] if parameter in self._unwritten else None

    def add_at(self, parameter: nn.Parameter, entries: Tensor, values: Tensor) -> None:
        """Add every segment's values to the entries of its gradient of a matrix, each to the one that is named."""
        count, (height, width) = len(self.segments.rows), parameter.shape
        places = self.segments.places(entries.device).repeat_interleave(self.segments.multiple(entries))
        sums = values.new_zeros(count * height, width).index_add_(0, places * height + entries, values)
        self.add(parameter, sums.view(count, height, width))

    def add_by_batch(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Add one value per batch to the gradients of a parameter, those of many parameters by few kernels."""
        block = self.claim_rows(parameter)
        if block is not None:
            for row, index, value in zip(self.segments.targets, self.segments.index_in_segment, values, strict=True):
                self._late[index].append((block[row], value))
        else:
            parts = torch.split_with_sizes(values, self.segments.batches_per_segment)
            self.add(parameter, torch.stack([part.sum(dim=0) for part in parts]))

    def finish(self) -> None:
        """Write what was left to be written together; set the gradients of parameters that took no part to zero."""
        self._write_late()
        for parameter in self._unwritten:
            self._gradients.blocks[parameter][: self._gradients.plan.rows].zero_()

    def _block(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return the parameter's columns, and whether nothing was written there yet; from now on something is."""
        block, is_new = self._gradients.blocks[parameter], parameter in self._unwritten
        self._unwritten.discard(parameter)
        if not is_new:
            self._write_late()
        if (factors := self._gradients.factors.pop(parameter, None)) is not None:
            block[: len(factors)].copy_(factors.dense())
        return block, is_new

    def _write_late(self) -> None:
        """Write the values of the first batches of all segments, then add those of the second ones, and so on."""
        for index, pairs in sorted(self._late.items()):
            rows, values = zip(*pairs, strict=True)
            (torch._foreach_add_ if index else torch._foreach_copy_)(rows, values)
        self._late.clear()

    def _add(self, block: Tensor, values: Tensor | Iterable[Tensor], is_new: bool) -> None:
        if isinstance(values, Tensor) and self._range is not None:
            pairs: Iterable[tuple[Tensor, Tensor]] = [(block[self._range], values)]
        else:
            pairs = ((block[row], value) for row, value in zip(self.segments.rows, values, strict=True))
        for rows, value in pairs:
            (rows.copy_ if is_new else rows.add_)(value)


def _store(row: Tensor, work: Work, is_new: bool) -> None:
    (row.copy_ if is_new else row.add_)(work())
