"""Joint batches: several batches side by side share one pass through the network.

Consecutive batches whose gradients are added to the same row of the gradient matrix form a segment of the joint batch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from itertools import groupby
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from spcl.aggregation.factors import FactoredGradients
from spcl.engine.rows import GradientMatrix

MOST_CLEARED = 1 << 21
"""Up to this many numbers stay in a CPU's cache; then clearing rows and adding a product is faster than writing it."""

Work = Callable[..., Tensor]
"""Computes the gradient of a parameter; given a slice of its first dimension, the gradient of that slice."""


class UnsupportedError(Exception):
    """The gradients of this network cannot be computed segment by segment; the message says why."""


@dataclass(frozen=True)
class Segments:
    """How the samples of a joint batch are divided into batches and segments.

    Batch-norm normalises every batch by its own statistics; gradients are computed per segment.

    Attributes:
        sizes: the number of samples of every batch.
        targets: for every batch, the row of the gradient matrix to which its gradient is added.

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
        """Return the segments of these batches; the most recent 64 are cached."""
        return cls(sizes, targets)

    @cached_property
    def samples(self) -> int:
        """The number of samples of the joint batch."""
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
        """Whether all segments have the same length and consecutive rows."""
        first = self.rows[0]
        return len(set(self.lengths)) == 1 and self.rows == tuple(range(first, first + len(self.rows)))

    @cached_property
    def batches_per_segment(self) -> tuple[int, ...]:
        """The number of batches of every segment."""
        return tuple(len(list(group)) for _, group in groupby(self.targets))

    @cached_property
    def index_in_segment(self) -> tuple[int, ...]:
        """The index of every batch within its segment."""
        return tuple(index for count in self.batches_per_segment for index in range(count))

    @cached_property
    def tables(self) -> dict[object, Any]:
        """A cache of the tables about these batches that kernels read; CUDA graphs keep the addresses."""
        return {}

    def multiple(self, tensor: Tensor) -> int:
        """Return how many consecutive entries along the tensor's first dimension belong to one sample."""
        count = tensor.shape[0] if tensor.ndim else 0
        if count % self.samples or not count:
            raise UnsupportedError(
                f"a tensor of shape {tuple(tensor.shape)} has no first dimension of {self.samples} samples"
            )
        return count // self.samples

    def places(self, device: torch.device) -> Tensor:
        """Return the index of the segment of every sample."""
        key = "places", device
        if key not in self.tables:
            places = torch.arange(len(self.rows)).repeat_interleave(torch.tensor(self.lengths))
            self.tables[key] = places.to(device)
        kept: Tensor = self.tables[key]
        return kept

    def lengths_in(self, tensor: Tensor) -> tuple[int, ...]:
        """Return how many entries along the tensor's first dimension belong to each segment."""
        multiple = self.multiple(tensor)
        return self.lengths if multiple == 1 else tuple(multiple * length for length in self.lengths)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor by segment."""
        return torch.split_with_sizes(tensor, self.lengths_in(tensor))


STREAMS = 4
"""The number of side streams that share the work."""


class SideStreams(AbstractContextManager["SideStreams"]):
    """Runs pieces of work on several CUDA streams in turn; at the end of the block the main stream waits for all.

    On a CPU the work runs at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: list[torch.cuda.Stream] = []
        self._count = 0

    def run(self, work: Callable[[], object]) -> None:
        """Run a piece of work after all work queued on the main stream so far."""
        if self._device.type != "cuda":
            work()
            return
        stream = side_stream(self._device, 1 + self._count % STREAMS)
        self._count += 1
        if stream not in self._used:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._used.append(stream)
        with torch.cuda.stream(stream):
            work()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in self._used:
            torch.cuda.current_stream(self._device).wait_stream(stream)


@cache
def side_stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """Return a CUDA stream beside the main one; learners share it, because the allocator keeps memory per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class SegmentGradients:
    """Writes the gradients of all segments of a joint batch, parameter by parameter, into the gradient matrix.

    Args:
        gradients: the gradient matrix.
        segments: the segments of the joint batch.
        fresh: whether the rows are empty and no other pass of the step writes to them.

    Attributes:
        segments: the segments of the joint batch.
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
        """Note that the forward pass uses these parameters; return the tensor that autograd tracks in their place."""
        return self._gradients.anchor

    def converted(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight in another type; one kernel converts the weights of all convolutions together."""
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
        """Add every segment's ``leftᵀ right`` to its gradient of a weight matrix."""
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
        """Add the sum of every segment's values to the gradients of a parameter that was broadcast from ``shape``."""
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
        """Keep the sums as a factor if the layer's weight keeps the same values as a factor; return whether it does."""
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
        """Add what each piece of work, one per segment, computes to the gradients of a parameter.

        ``separable`` work can also compute the gradient of a slice of the parameter's first dimension.
        """
        block, is_new = self._block(parameter)
        for row, work in zip(self.segments.rows, works, strict=True):
            streams.run(partial(_store, block[row], work, is_new))

    def claim_rows(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's columns for the caller to overwrite; None if they hold a gradient already."""
        return self._block(parameter)[0] if parameter in self._unwritten else None

    def add_at(self, parameter: nn.Parameter, entries: Tensor, values: Tensor) -> None:
        """Add ``values[i]`` to row ``entries[i]`` of the gradient of a weight matrix, segment by segment."""
        count, (height, width) = len(self.segments.rows), parameter.shape
        places = self.segments.places(entries.device).repeat_interleave(self.segments.multiple(entries))
        sums = values.new_zeros(count * height, width).index_add_(0, places * height + entries, values)
        self.add(parameter, sums.view(count, height, width))

    def add_by_batch(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Add one value per batch to the gradients of a parameter; values of many parameters are written together."""
        block = self.claim_rows(parameter)
        if block is not None:
            for row, index, value in zip(self.segments.targets, self.segments.index_in_segment, values, strict=True):
                self._late[index].append((block[row], value))
        else:
            parts = torch.split_with_sizes(values, self.segments.batches_per_segment)
            self.add(parameter, torch.stack([part.sum(dim=0) for part in parts]))

    def finish(self) -> None:
        """Write the values collected by :meth:`add_by_batch`; set the gradients of unused parameters to zero."""
        self._write_late()
        for parameter in self._unwritten:
            self._gradients.blocks[parameter][: self._gradients.plan.rows].zero_()

    def _block(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return a parameter's columns for the caller to write to, and whether they were empty until now."""
        block, is_new = self._gradients.blocks[parameter], parameter in self._unwritten
        self._unwritten.discard(parameter)
        if not is_new:
            self._write_late()
        if (factors := self._gradients.factors.pop(parameter, None)) is not None:
            block[: len(factors)].copy_(factors.dense())
        return block, is_new

    def _write_late(self) -> None:
        """Write the values of the first batch of all segments, then add the values of the second batches, and so on."""
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
