"""Convolutions of images: the weight gradients of all segments by one kernel, and results of filters with few weights.

Both are matrix products with patches, which have one row per pixel of the result and one column per weight of a filter,
that is per tap (place in the filter) and channel. Patches are read from the images and never stored.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spcl.engine.kernels.chunks import Chunks, divide, divisor, power_of_two
from spcl.engine.layers import ConvolutionOptions
from spcl.engine.segments import Segments

__all__ = ["Geometry", "convolve", "has_few_columns", "write_weight_gradients"]

PROGRAMS = 396
"""The approximate number of programs per kernel: several per multiprocessor."""

LEAST_ROWS = 512
"""The fewest rows per chunk: every chunk writes a whole weight gradient."""

BLOCK = 128
"""The most channels, filters or pixels of the result that a program multiplies at once."""

LEAST_BLOCK = 16
"""The smallest block that a matrix unit takes."""

ROWS = 64
"""The rows of patches that a program multiplies at a time."""

FEW_COLUMNS = 64
"""The most weights per filter for which :func:`convolve` is faster than cuDNN."""

SUMMED = {"CHUNKS": 16, "NUMBERS": 128}
"""The most chunks added up at a time, and the numbers of a gradient per program."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution of images.

    Attributes:
        image, result: height and width.
        kernel, stride, padding, dilation: vertical and horizontal.
        channels: the number of channels of the images.
        filters: the number of channels of the result.
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
    def of(cls, x: Tensor, weight: Tensor, options: ConvolutionOptions) -> "Geometry":
        """Return the sizes of the convolution of images by a weight."""
        stride, padding, dilation = options.stride, options.padding, options.dilation
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
    def arguments(self) -> dict[str, int]:
        """The sizes as keyword arguments of the kernels."""
        (in_h, in_w), (out_h, out_w) = self.image, self.result
        (by_h, shift_h), (by_w, shift_w) = divisor(out_h), divisor(out_w)
        return {
            "in_h": in_h,
            "in_w": in_w,
            "out_h": out_h,
            "by_h": by_h,
            "shift_h": shift_h,
            "out_w": out_w,
            "by_w": by_w,
            "shift_w": shift_w,
            "stride_h": self.stride[0],
            "stride_w": self.stride[1],
            "pad_h": self.padding[0],
            "pad_w": self.padding[1],
            "dilation_h": self.dilation[0],
            "dilation_w": self.dilation[1],
            "kernel_w": self.kernel[1],
            "channels": self.channels,
            "filters": self.filters,
        }


def has_few_columns(weight: Tensor) -> bool:
    """Return whether :func:`convolve` is faster than cuDNN."""
    return weight[0].numel() <= FEW_COLUMNS


def convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the convolution of images by filters with few weights."""
    x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
    shape = len(x), geometry.filters, *geometry.result
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows, filters = len(x) * geometry.pixels, _block(geometry.filters)
    _convolve[triton.cdiv(rows, BLOCK), triton.cdiv(geometry.filters, filters)](
        x=x,
        weight=weight,
        y=y,
        rows=rows,
        columns=geometry.columns,
        **geometry.arguments,
        ROWS=BLOCK,
        COLUMNS=_block(geometry.columns),
        FILTERS=filters,
        num_warps=4,
    )
    return y


def write_weight_gradients(x: Tensor, gradient: Tensor, geometry: Geometry, segments: Segments, block: Tensor) -> None:
    """Write the weight gradient of every segment into its row of a block.

    Args:
        x: the images.
        gradient: the gradient of the convolution's result.
        geometry: the sizes of the convolution.
        segments: the segments of the images.
        block: receives one weight gradient per row, with filters in channels-last format.
    """
    x, gradient = (each.contiguous(memory_format=torch.channels_last) for each in (x, gradient))
    tiles = _Tiles(geometry)
    most_rows = max(LEAST_ROWS, power_of_two(len(x) * geometry.pixels * tiles.count // PROGRAMS))
    sizes = tuple(length * geometry.pixels for length in segments.lengths_in(x))
    chunks = Chunks.of(sizes, most_rows, x.device, segments.tables)
    rows, numbers, is_whole = _rows(segments, x.device), geometry.filters * geometry.columns, chunks.count == len(sizes)
    parts = block if is_whole else torch.empty(chunks.count, numbers, device=x.device)
    _weight_gradients[tiles.count, chunks.count](
        x=x,
        gradient=gradient,
        out=parts,
        table=chunks.table,
        rows=rows,
        out_stride=parts.stride(0),
        columns=geometry.columns,
        tiles=tiles.by_filters,
        **geometry.arguments,
        **tiles.block,
        IS_WHOLE=is_whole,
        num_warps=4,
        num_stages=3,
    )
    if not is_whole:
        _sum_chunks[triton.cdiv(numbers, SUMMED["NUMBERS"]), len(sizes)](
            parts=parts,
            out=block,
            first=chunks.first,
            rows=rows,
            numbers=numbers,
            out_stride=block.stride(0),
            **SUMMED,
        )


class _Tiles:
    """The tiles of a weight gradient: filters × channels of one tap, or of all taps if there are few channels.

    Attributes:
        by_filters: the number of blocks of filters.
        count: the number of tiles.
        block: the rows, columns and filters that a program multiplies at once.
    """

    def __init__(self, geometry: Geometry) -> None:
        is_flat = geometry.channels < LEAST_BLOCK
        taps, width = (1, geometry.columns) if is_flat else (geometry.columns // geometry.channels, geometry.channels)
        columns, filters = _block(width), _block(geometry.filters)
        self.by_filters = triton.cdiv(geometry.filters, filters)
        self.count = taps * triton.cdiv(width, columns) * self.by_filters
        self.block = {"ROWS": ROWS, "COLUMNS": columns, "FILTERS": filters, "IS_FLAT": is_flat}


def _block(size: int) -> int:
    return max(LEAST_BLOCK, min(BLOCK, power_of_two(size)))


def _rows(segments: Segments, device: torch.device) -> Tensor:
    """Return the rows of the segments as a tensor, cached in their tables."""
    key = "rows", device
    if key not in segments.tables:
        segments.tables[key] = torch.tensor(segments.rows, dtype=torch.int64, device=device)
    rows: Tensor = segments.tables[key]
    return rows


@triton.jit
def _pixels(row, out_h, by_h, shift_h, out_w, by_w, shift_w, stride_h, stride_w, pad_h, pad_w):
    """Return image, top and left of the patch of every row."""
    line = divide(row, by_w, shift_w)
    image = divide(line, by_h, shift_h)
    return image, (line - image * out_h) * stride_h - pad_h, (row - line * out_w) * stride_w - pad_w


@triton.jit
def _convolve(
    x, weight, y, rows, columns,
    in_h, in_w, out_h, by_h, shift_h, out_w, by_w, shift_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    kernel_w, channels, filters, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """Multiply patches by filters, all columns at once."""
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
    """Return tap, channel and number of every column of a tile, and a mask of the existing columns."""
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
    """Multiply the gradients of a chunk by its patches: one tile of filters and columns, of one tap unless flat."""
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
    """Add up the chunks of every segment, in a fixed order, in its row."""
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
