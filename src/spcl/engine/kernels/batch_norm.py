"""Batch-norm of several batches of images side by side, together with what follows it in a network.

The rows of every batch are cut into chunks, and each program of a kernel reads a chunk of a few channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from spcl.engine.kernels.chunks import Chunks, power_of_two
from spcl.engine.kernels.division import divisor
from spcl.engine.kernels.normalisation import batch_sums, chunk_sums, input_gradient, normalise
from spcl.engine.kernels.pooling import normalise_and_pool, pooled_input_gradient, pooled_sums
from spcl.engine.kernels.statistics import batch_statistics, chunk_statistics, running_averages

__all__ = ["BatchNorm", "BatchNormOptions"]

PROGRAMS = 512
"""About how many programs a kernel has, several for each multiprocessor."""

LEAST_ROWS, MOST_ROWS = 32, 512
"""The rows of a chunk."""

CHANNELS, ROWS = 64, 32
"""The most channels and rows that a program holds at once."""

COMBINED = {"CHUNKS": 128, "CHANNELS": 16}
"""The same where the results of chunks are combined."""

AVERAGED = {"CHANNELS": 32}


@dataclass(frozen=True)
class BatchNormOptions:
    """How images are normalised, and what follows.

    Attributes:
        sizes: the numbers of images of the batches.
        momentum, eps: of batch-norm.
        relu: whether negative results are zero.
        pool: whether the largest of every 2×2 pixels are kept, after ReLU.
        add_gradients: receives the gradients of weight and bias, a row per batch.
        tables: keep what kernels need to know of the batches.
    """

    sizes: tuple[int, ...]
    momentum: float
    eps: float
    relu: bool
    pool: bool
    add_gradients: Callable[[Tensor, Tensor], None]
    tables: dict[object, Any]


class BatchNorm(torch.autograd.Function):
    """``relu((x − mean) / √(variance + eps) · weight + bias + addend)`` with mean and variance of every batch.

    Arguments: images N×C×H×W; what is added to the result, of the same shape, or None; (weight, bias); running mean and
    variance, which are updated batch after batch, or None; options; a tensor that autograd follows in place of weight
    and bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        parameters: tuple[Tensor, Tensor],
        running: tuple[Tensor, Tensor] | None,
        options: BatchNormOptions,
        anchor: Tensor,
    ) -> Tensor:
        """Return the result for the images of all batches."""
        x = x.contiguous(memory_format=torch.channels_last)
        statistics = _statistics(x, running, options)
        known = *parameters, *statistics[:2]
        if options.pool:
            y = _empty_images(x, x.shape[2] // 2, x.shape[3] // 2)
            launch = _Launch(y, options)
            sizes = x.shape[1], y.shape[3], *divisor(y.shape[3])
            normalise_and_pool[launch.grid](x, y, *known, launch.chunks.table, *sizes, **launch.shape)
        else:
            addend = None if addend is None else addend.contiguous(memory_format=torch.channels_last)
            y, launch = torch.empty_like(x), _Launch(x, options)
            flags = {"ADD": addend is not None, "RELU": options.relu}
            added = x if addend is None else addend
            normalise[launch.grid](x, added, y, *known, launch.chunks.table, x.shape[1], **flags, **launch.shape)
        ctx.adds = addend is not None
        ctx.save_for_backward(x, y if ctx.adds and options.relu else x, *known)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the images and the addend; pass on those of weight and bias."""
        x, y, *known = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        if ctx.options.pool:
            found, sums = _pooled_gradients(gradient, x, known, ctx.options)
            flow = gradient
        else:
            found, flow, sums = _gradients(gradient, x, y, known, ctx.adds, ctx.options)
        ctx.options.add_gradients(sums[1], sums[0])
        return found, flow if ctx.adds else None, None, None, None, None


class _Launch:
    """The programs of a kernel over the rows of images."""

    def __init__(self, images: Tensor, options: BatchNormOptions) -> None:
        count, channels, height, width = images.shape
        block = min(CHANNELS, power_of_two(channels))
        columns = triton.cdiv(channels, block)
        most_rows = power_of_two(count * height * width * columns // PROGRAMS)
        most_rows = min(MOST_ROWS, max(LEAST_ROWS, most_rows))
        rows = tuple(size * height * width for size in options.sizes)
        self.chunks = Chunks.of(rows, most_rows, images.device, options.tables)
        self.grid = self.chunks.count, columns
        self.shape = {"ROWS": ROWS, "CHANNELS": block}
        self.combined = triton.cdiv(channels, COMBINED["CHANNELS"]), len(options.sizes)

    def partial(self, channels: int) -> Tensor:
        """Return room for two numbers of every chunk and channel."""
        return torch.empty(2, self.chunks.count, channels, device=self.chunks.table.device)


def _statistics(x: Tensor, running: tuple[Tensor, Tensor] | None, options: BatchNormOptions) -> Tensor:
    """Return mean, 1 / √(variance + eps) and unbiased variance of every batch; update the running averages."""
    channels, batches, launch = x.shape[1], len(options.sizes), _Launch(x, options)
    chunks, partial = launch.chunks, launch.partial(channels)
    statistics = torch.empty(3, batches, channels, device=x.device)
    chunk_statistics[launch.grid](x, *partial, chunks.table, channels, **launch.shape)
    batch_statistics[launch.combined](
        *partial, chunks.table, chunks.first, *statistics, channels, options.eps, **COMBINED
    )
    if running is not None:
        padded, grid = power_of_two(batches), (triton.cdiv(channels, AVERAGED["CHANNELS"]),)
        averages = statistics[0], statistics[2], *running
        running_averages[grid](*averages, channels, batches, options.momentum, BATCHES=padded, **AVERAGED)
    return statistics


def _gradients(
    gradient: Tensor, x: Tensor, y: Tensor, known: Sequence[Tensor], adds: bool, options: BatchNormOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the images, that behind ReLU, and its sums over the batches for bias and weight."""
    channels, launch = x.shape[1], _Launch(x, options)
    chunks, partial, sums = launch.chunks, launch.partial(channels), _sums(x, options)
    is_stored = adds and options.relu
    flow, found = torch.empty_like(x) if is_stored else gradient, torch.empty_like(x)
    flags = {"ADD": adds, "RELU": options.relu}
    chunk_sums[launch.grid](gradient, x, y, flow, *known, *partial, chunks.table, channels, **flags, **launch.shape)
    batch_sums[launch.combined](*partial, chunks.first, *sums, channels, **COMBINED)
    tables, flags = (chunks.table, chunks.rows), {"RELU": options.relu and not is_stored}
    input_gradient[launch.grid](flow, x, found, *known, *sums, *tables, channels, **flags, **launch.shape)
    return found, flow, sums


def _pooled_gradients(
    gradient: Tensor, x: Tensor, known: Sequence[Tensor], options: BatchNormOptions
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the images, and the sums of that behind ReLU over the batches for bias and weight."""
    channels, launch = x.shape[1], _Launch(gradient, options)
    chunks, partial, sums = launch.chunks, launch.partial(channels), _sums(x, options)
    found, sizes = torch.empty_like(x), (channels, gradient.shape[3], *divisor(gradient.shape[3]))
    pooled_sums[launch.grid](gradient, x, *known, *partial, chunks.table, *sizes, **launch.shape)
    batch_sums[launch.combined](*partial, chunks.first, *sums, channels, **COMBINED)
    tables = chunks.table, chunks.rows
    pooled_input_gradient[launch.grid](gradient, x, found, *known, *sums, *tables, *sizes, **launch.shape)
    return found, sums


def _sums(x: Tensor, options: BatchNormOptions) -> Tensor:
    return torch.empty(2, len(options.sizes), x.shape[1], device=x.device)


def _empty_images(like: Tensor, height: int, width: int) -> Tensor:
    shape = (len(like), like.shape[1], height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
