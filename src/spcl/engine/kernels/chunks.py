"""The pixels of several batches of images, cut into chunks that programs of a kernel work on side by side.

In memory images are rows of channels (channels-last), one row per pixel.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Chunks", "power_of_two"]


@dataclass(frozen=True)
class Chunks:
    """The chunks of all batches, none of which has rows of two batches.

    Attributes:
        table: batch, first row and end of every chunk.
        first: the first chunk of every batch, and the number of chunks.
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
        """Return the chunks of batches that have so many rows each, which are kept in the tables."""
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
    """Return the smallest power of two that is at least so large.

    >>> [power_of_two(number) for number in (0, 1, 5, 64)]
    [1, 1, 8, 64]
    """
    return 1 << max(0, number - 1).bit_length()
