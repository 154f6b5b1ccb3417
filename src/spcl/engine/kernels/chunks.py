"""Common parts of all kernels: chunks of the pixels of a joint batch, and index arithmetic.

In memory an image is one row of channels per pixel (channels-last). Each program of a kernel works on a chunk of rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """The rows of several batches, cut into chunks; each chunk lies within one batch.

    Attributes:
        table: batch, first row and end row of every chunk.
        first: the index of every batch's first chunk, then the number of chunks.
        rows: the number of rows of every batch.
        count: the number of chunks.

    >>> Chunks.of((5, 2), 3, torch.device("cpu"), tables={}).table
    tensor([[0, 0, 3],
            [0, 3, 5],
            [1, 5, 7]], dtype=torch.int32)
    """

    table: Tensor
    first: Tensor
    rows: Tensor
    count: int

    @classmethod
    def of(cls, sizes: tuple[int, ...], most_rows: int, device: torch.device, tables: dict[object, Any]) -> "Chunks":
        """Return the chunks of batches with ``sizes`` rows, at most ``most_rows`` per chunk; cached in ``tables``."""
        key = "chunks", sizes, most_rows, device
        if key not in tables:
            tables[key] = cls._make(sizes, most_rows, device)
        chunks: Chunks = tables[key]
        return chunks

    @classmethod
    def _make(cls, sizes: tuple[int, ...], most_rows: int, device: torch.device) -> "Chunks":
        table, first, start = list[tuple[int, int, int]](), [0], 0
        for batch, size in enumerate(sizes):
            end = start + size
            table += [(batch, row, min(row + most_rows, end)) for row in range(start, end, most_rows)]
            first.append(len(table))
            start = end
        tensors = [torch.tensor(values, dtype=torch.int32, device=device) for values in (table, first, sizes)]
        return cls(*tensors, len(table))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``.

    >>> [power_of_two(number) for number in (0, 1, 5, 64)]
    [1, 1, 8, 64]
    """
    return 1 << max(0, number - 1).bit_length()


def divisor(number: int) -> tuple[int, int]:
    """Return factor and shift for :func:`divide`: ⌊2³¹⁺ˢ / d⌋ + 1 and the least s with 2ˢ ≥ d.

    A GPU has no instruction that divides integers, so kernels multiply and shift instead.

    >>> factor, shift = divisor(7)
    >>> [(row * factor) >> (31 + shift) for row in (0, 6, 7, 2**31 - 1)] == [0, 0, 1, (2**31 - 1) // 7]
    True
    """
    shift = (number - 1).bit_length()
    return (1 << 31 + shift) // number + 1, shift


@triton.jit
def divide(numbers, factor, shift):
    """Return ⌊n / d⌋ for numbers n from 0 to 2³¹ − 1, given factor and shift of :func:`divisor` for d."""
    doubled = (2 * numbers.to(tl.uint32)).to(tl.uint32)
    return (tl.umulhi(doubled, factor.to(tl.uint32)) >> shift).to(tl.int32)


@triton.jit
def channels_of(channels, CHANNELS: tl.constexpr):
    """Return a program's channels, and a mask of the existing ones."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return channel, channel < channels


@triton.jit
def chunk_of(table):
    """Return a program's chunk: its number, batch, first row and end row."""
    chunk = tl.program_id(0)
    return chunk, tl.load(table + 3 * chunk), tl.load(table + 3 * chunk + 1), tl.load(table + 3 * chunk + 2)


@triton.jit
def rows_of(row, end, inside, ROWS: tl.constexpr):
    """Return the ``ROWS`` rows from ``row`` on, and a mask of rows before ``end`` and existing channels."""
    rows = row + tl.arange(0, ROWS)
    return rows, (rows < end)[:, None] & inside[None, :]


@triton.jit
def scaling_of(weight, bias, means, scales, batch, channels, channel, inside):
    """Return mean, 1/σ, w/σ and b for every channel of a batch: y = (x − mean) · w/σ + b."""
    place = batch * channels + channel
    mean = tl.load(means + place, mask=inside, other=0.0)
    scale = tl.load(scales + place, mask=inside, other=0.0)
    factor = scale * tl.load(weight + channel, mask=inside, other=0.0)
    return mean[None, :], scale, factor[None, :], tl.load(bias + channel, mask=inside, other=0.0)[None, :]


def launch_first(device: torch.device) -> None:
    """Compile and launch a tiny kernel, to find out whether this machine can; raise the compiler's error if not."""
    _double[(1,)](torch.ones(1, device=device))


@triton.jit
def _double(number):
    """Double a number."""
    tl.store(number, 2.0 * tl.load(number))
