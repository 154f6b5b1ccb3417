"""Convolutions of images: the weight gradient of every segment of a batch by one kernel, and results from few inputs.

Both are matrix products with patches, which are read from the images and never stored: a row per pixel of the result,
a column per weight of a filter, that is per place in the filter (tap) and channel.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spcl.engine.kernels.chunks import Chunks, power_of_two
from spcl.engine.kernels.division import divide, divisor
from spcl.engine.segments import Segments

__all__ = ["Geometry", "convolve", "has_few_columns", "write_weight_gradients"]

PROGRAMS = 396
"""About how many programs a kernel has, several for each multiprocessor."""

LEAST_ROWS = 512
"""The least rows of a chunk, of which every one writes a gradient."""

BLOCK = 128
"""The most channels or filters of a product that a program computes at once; and pixels of a result."""

LEAST_BLOCK = 16
"""The least of the same that a matrix unit takes."""

ROWS = 64
"""Rows of patches that a program multiplies at a time."""

FEW_COLUMNS = 64
"""Up to so many weights a filter, cuDNN's kernels are slower than these."""

SUMMED = {"CHUNKS": 16, "NUMBERS": 128}
"""How many numbers a program sums, over how many chunks at a time."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution of images.

    Attributes:
        image, result: height and width.
        kernel, stride, padding, dilation: by dimension.
        channels, filters: of images and result.
    """

    image: tuple[int, int]
    result: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    channels: int
    filters: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, options: tuple[Any, ...]) -> "Geometry":
        """Return the sizes; the options are those of ``torch.ops.aten.convolution`` after the bias."""
        stride, padding, dilation = options[:3]
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        sizes = zip(x.shape[2:], padding, reach, stride, strict=True)
        height, width = ((size + 2 * pad - extent) // step + 1 for size, pad, extent, step in sizes)
        pairs = (tuple(pair) for pair in (x.shape[2:], (height, width), weight.shape[2:], stride, padding, dilation))
        return cls(*pairs, channels=x.shape[1], filters=len(weight))

    @property
    def columns(self) -> int:
        """The number of weights of a filter."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def pixels(self) -> int:
        """The number of pixels of a result."""
        return self.result[0] * self.result[1]

    @property
    def arguments(self) -> tuple[int, ...]:
        """The sizes as arguments of kernels."""
        height, width = self.result
        result = height, *divisor(height), width, *divisor(width)
        return (
            *self.image,
            *result,
            *self.stride,
            *self.padding,
            *self.dilation,
            self.kernel[1],
            self.channels,
            self.filters,
        )


def has_few_columns(weight: Tensor) -> bool:
    """Return whether :func:`convolve` is faster than cuDNN."""
    return weight[0].numel() <= FEW_COLUMNS


def convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return a convolution of images by filters with few weights."""
    x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
    shape = len(x), geometry.filters, *geometry.result
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows = len(x) * geometry.pixels
    filters = _block(geometry.filters)
    blocks = {"ROWS": BLOCK, "COLUMNS": _block(geometry.columns), "FILTERS": filters}
    grid = triton.cdiv(rows, BLOCK), triton.cdiv(geometry.filters, filters)
    _convolve[grid](x, weight, y, rows, geometry.columns, *geometry.arguments, **blocks, num_warps=4)
    return y


def write_weight_gradients(x: Tensor, gradient: Tensor, geometry: Geometry, segments: Segments, block: Tensor) -> None:
    """Write the weight gradient of every segment into its row of a block, whose filters are channels-last.

    Args:
        x: the images.
        gradient: of the result.
        geometry: of the convolution.
        segments: of the images.
        block: one gradient a row.
    """
    x, gradient = (each.contiguous(memory_format=torch.channels_last) for each in (x, gradient))
    tiles = _Tiles(geometry)
    most_rows = max(LEAST_ROWS, power_of_two(len(x) * geometry.pixels * tiles.count // PROGRAMS))
    sizes = tuple(length * geometry.pixels for length in segments.lengths_in(x))
    chunks = Chunks.of(sizes, most_rows, x.device, segments.tables)
    rows, numbers, is_whole = _rows(segments, x.device), geometry.filters * geometry.columns, chunks.count == len(sizes)
    parts = block if is_whole else torch.empty(chunks.count, numbers, device=x.device)
    places = chunks.table, rows, parts.stride(0), geometry.columns, tiles.by_filters
    _weight_gradients[tiles.count, chunks.count](
        x, gradient, parts, *places, *geometry.arguments, **tiles.shape, IS_WHOLE=is_whole, num_warps=4, num_stages=3
    )
    if not is_whole:
        grid = triton.cdiv(numbers, SUMMED["NUMBERS"]), len(sizes)
        _sum_chunks[grid](parts, block, chunks.first, rows, numbers, block.stride(0), **SUMMED)


class _Tiles:
    """How a weight gradient is cut into tiles: of filters and, for every tap, channels; of few channels, all taps."""

    def __init__(self, geometry: Geometry) -> None:
        is_flat = geometry.channels < LEAST_BLOCK
        taps, width = (1, geometry.columns) if is_flat else (geometry.columns // geometry.channels, geometry.channels)
        columns, filters = _block(width), _block(geometry.filters)
        self.by_filters = triton.cdiv(geometry.filters, filters)
        self.count = taps * triton.cdiv(width, columns) * self.by_filters
        self.shape = {"ROWS": ROWS, "COLUMNS": columns, "FILTERS": filters, "IS_FLAT": is_flat}


def _block(size: int) -> int:
    return max(LEAST_BLOCK, min(BLOCK, power_of_two(size)))


def _rows(segments: Segments, device: torch.device) -> Tensor:
    """Return the rows of the segments, which are kept in their tables."""
    key = "rows", device
    if key not in segments.tables:
        segments.tables[key] = torch.tensor(segments.rows, dtype=torch.int64, device=device)
    rows: Tensor = segments.tables[key]
    return rows


@triton.jit
def _pixels(row, out_h, by_h, shift_h, out_w, by_w, shift_w, stride_h, stride_w, pad_h, pad_w):
    """Return the image of every row of patches, and where its patch begins."""
    line = divide(row, by_w, shift_w)
    image = divide(line, by_h, shift_h)
    return image, (line - image * out_h) * stride_h - pad_h, (row - line * out_w) * stride_w - pad_w


@triton.jit
def _convolve(
    x, weight, y, rows, columns,
    in_h, in_w, out_h, by_h, shift_h, out_w, by_w, shift_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    kernel_w, channels, filters, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """Multiply patches by filters; all columns at once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    output = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    image, top, left = _pixels(row, out_h, by_h, shift_h, out_w, by_w, shift_w, stride_h, stride_w, pad_h, pad_w)
    tap = column // channels
    down, right = (tap // kernel_w) * dilation_h, (tap % kernel_w) * dilation_w
    at_h, at_w = top[:, None] + down[None, :], left[:, None] + right[None, :]
    mask = (
        (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w) & (row < rows)[:, None] & (column < columns)[None, :]
    )
    at = ((image[:, None] * in_h + at_h) * in_w + at_w) * channels + (column % channels)[None, :]
    patches = tl.load(x + at, mask=mask, other=0.0)
    inside = (column < columns)[:, None] & (output < filters)[None, :]
    weights = tl.load(weight + output[None, :] * columns + column[:, None], mask=inside, other=0.0)
    result = tl.dot(patches, weights)
    stored = (row < rows)[:, None] & (output < filters)[None, :]
    tl.store(y + row[:, None] * filters + output[None, :], result.to(y.dtype.element_ty), mask=stored)


@triton.jit
def _columns(tile, channels, columns, COLUMNS: tl.constexpr, IS_FLAT: tl.constexpr):
    """Return tap and channel of every column of a tile, the columns, and which of them there are."""
    if IS_FLAT:
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        return column // channels, column % channels, column, column < columns
    else:
        tiles = tl.cdiv(channels, COLUMNS)
        tap = tile // tiles
        channel = (tile % tiles) * COLUMNS + tl.arange(0, COLUMNS)
        return tap, channel, tap * channels + channel, channel < channels


@triton.jit
def _weight_gradients(
    x, gradient, out, table, rows, out_stride, columns, tiles,
    in_h, in_w, out_h, by_h, shift_h, out_w, by_w, shift_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    kernel_w, channels, filters, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FILTERS: tl.constexpr,
    IS_FLAT: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Multiply the gradients of a chunk by its patches: a tile of filters and of columns, of one tap unless flat."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    output = (tile % tiles) * FILTERS + tl.arange(0, FILTERS)
    tap, channel, column, is_known = _columns(tile // tiles, channels, columns, COLUMNS, IS_FLAT)
    down, right = (tap // kernel_w) * dilation_h, (tap % kernel_w) * dilation_w
    begin = tl.load(table + 3 * chunk + 1)
    end = tl.load(table + 3 * chunk + 2)
    sums = tl.zeros([FILTERS, COLUMNS], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        image, top, left = _pixels(row, out_h, by_h, shift_h, out_w, by_w, shift_w, stride_h, stride_w, pad_h, pad_w)
        if IS_FLAT:
            at_h, at_w = top[:, None] + down[None, :], left[:, None] + right[None, :]
            inside = (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w) & (row < end)[:, None]
            at = ((image[:, None] * in_h + at_h) * in_w + at_w) * channels
        else:
            at_h, at_w = top + down, left + right
            inside = ((at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w) & (row < end))[:, None]
            at = (((image * in_h + at_h) * in_w + at_w) * channels)[:, None]
        patches = tl.load(x + at + channel[None, :], mask=inside & is_known[None, :], other=0.0)
        known = (row < end)[:, None] & (output < filters)[None, :]
        flow = tl.load(gradient + row[:, None] * filters + output[None, :], mask=known, other=0.0)
        sums = tl.dot(tl.trans(flow), patches, sums)
    place = tl.load(rows + tl.load(table + 3 * chunk)) if IS_WHOLE else chunk.to(tl.int64)
    to = out + place * out_stride + output[:, None] * columns + column[None, :]
    tl.store(to, sums, mask=(output < filters)[:, None] & is_known[None, :])


@triton.jit
def _sum_chunks(parts, out, first, rows, numbers, out_stride, CHUNKS: tl.constexpr, NUMBERS: tl.constexpr):
    """Sum over the chunks of every segment, in a fixed order, into its row."""
    segment = tl.program_id(1)
    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    inside = number < numbers
    begin = tl.load(first + segment)
    end = tl.load(first + segment + 1)
    total = tl.zeros([CHUNKS, NUMBERS], tl.float32)
    for start in range(begin, end, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        at = chunk.to(tl.int64)[:, None] * numbers + number[None, :]
        total += tl.load(parts + at, mask=(chunk < end)[:, None] & inside[None, :], other=0.0)
    tl.store(out + tl.load(rows + segment) * out_stride + number, tl.sum(total, 0), mask=inside)
