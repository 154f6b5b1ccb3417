"""Batch-norm of several batches side by side as Triton kernels, with ReLU in the same pass over the images.

In memory images are rows of channels (channels-last). The rows of every batch are cut into chunks, and each program of
a kernel reads a chunk of a few channels. Means and squared deviations of chunks are combined by Chan's formula.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["AddGradients", "BatchNorm"]

PROGRAMS = 2048
"""About how many programs a kernel has, several for each multiprocessor."""

CHANNELS, ROWS = 64, 64
"""The most channels and rows that a program holds at once."""

FINAL_CHANNELS, FINAL_CHUNKS = 32, 64
"""The same where the results of chunks are combined."""

AddGradients = Callable[[Tensor, Tensor], None]
"""Receives the gradients of weight and bias, a row per batch."""


@dataclass(frozen=True)
class _Chunks:
    """The chunks of all batches: (batch, first row, end) each, the first chunk of every batch, its number of rows."""

    table: Tensor
    first: Tensor
    rows: Tensor
    count: int


@lru_cache(maxsize=1024)
def _chunks(sizes: tuple[int, ...], most_rows: int, device: torch.device) -> _Chunks:
    table, first, start = list[tuple[int, int, int]](), [0], 0
    for batch, size in enumerate(sizes):
        table += [(batch, row, min(row + most_rows, start + size)) for row in range(start, start + size, most_rows)]
        first.append(len(table))
        start += size
    tensors = [torch.tensor(values, dtype=torch.int32, device=device) for values in (table, first, sizes)]
    return _Chunks(*tensors, len(table))


class BatchNorm(torch.autograd.Function):
    """``relu((x − mean) / √(variance + eps) · weight + bias)`` with mean and variance of every batch.

    Arguments: images N×C×H×W on a GPU; (weight, bias); running mean and variance, which are updated batch after batch,
    or None; the numbers of images of the batches; momentum; eps; whether negative results are zero; a function for the
    gradients of weight and bias; a tensor that autograd follows in place of these.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameters: tuple[Tensor, Tensor],
        running: tuple[Tensor, Tensor] | None,
        sizes: tuple[int, ...],
        momentum: float,
        eps: float,
        relu: bool,
        add_gradients: AddGradients,
        anchor: Tensor,
    ) -> Tensor:
        """Return the result for the images of all batches."""
        weight, bias = parameters
        x = x.contiguous(memory_format=torch.channels_last)
        (count, channels, height, width), batches = x.shape, len(sizes)
        block = min(CHANNELS, triton.next_power_of_2(channels))
        rows = count * height * width * triton.cdiv(channels, block) // PROGRAMS
        most_rows = max(32, triton.next_power_of_2(max(1, rows)))
        chunks = _chunks(tuple(size * height * width for size in sizes), most_rows, x.device)
        partial = torch.empty(2, chunks.count, channels, device=x.device)
        statistics = torch.empty(3, batches, channels, device=x.device)
        grid, final = (chunks.count, triton.cdiv(channels, block)), (triton.cdiv(channels, FINAL_CHANNELS), batches)
        shape = {"ROWS": min(most_rows, ROWS), "CHANNELS": block}
        combined = {"CHUNKS": FINAL_CHUNKS, "CHANNELS": FINAL_CHANNELS}
        _chunk_statistics[grid](x, *partial, chunks.table, channels, **shape)
        _batch_statistics[final](*partial, chunks.table, chunks.first, *statistics, channels, eps, **combined)
        if running is not None:
            padded = triton.next_power_of_2(batches)
            _running_averages[(triton.cdiv(channels, FINAL_CHANNELS),)](
                statistics[0], statistics[2], *running, channels, batches, momentum, BATCHES=padded, **_only(combined)
            )
        y = torch.empty_like(x)
        _normalise[grid](x, y, weight, bias, *statistics[:2], chunks.table, channels, RELU=relu, **shape)
        ctx.save_for_backward(x, y if relu else x, weight, statistics)
        ctx.launch = grid, final, chunks, shape, combined
        ctx.relu, ctx.add_gradients = relu, add_gradients
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x; pass on those of weight and bias."""
        x, y, weight, statistics = ctx.saved_tensors
        grid, final, chunks, shape, combined = ctx.launch
        gradient, channels = gradient.contiguous(memory_format=torch.channels_last), x.shape[1]
        partial = torch.empty(2, chunks.count, channels, device=x.device)
        sums = torch.empty(2, *statistics.shape[1:], device=x.device)
        images = gradient, x, y
        _chunk_sums[grid](*images, *statistics[:2], *partial, chunks.table, channels, RELU=ctx.relu, **shape)
        _batch_sums[final](*partial, chunks.first, *sums, channels, **combined)
        found = torch.empty_like(x)
        tables = chunks.table, chunks.rows
        _input_gradient[grid](*images, found, weight, *statistics[:2], *sums, *tables, channels, RELU=ctx.relu, **shape)
        ctx.add_gradients(sums[1], sums[0])
        return found, *[None] * 8


def _only(options: dict[str, int]) -> dict[str, int]:
    return {"CHANNELS": options["CHANNELS"]}


@triton.jit
def _chunk_statistics(x, means, deviations, table, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute mean and squared deviations of every chunk."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    begin = tl.load(table + 3 * chunk + 1).to(tl.int64)
    end = tl.load(table + 3 * chunk + 2).to(tl.int64)
    inside = column < channels
    mean = tl.zeros([CHANNELS], tl.float32)
    squares = tl.zeros([CHANNELS], tl.float32)
    seen = 0.0
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & inside[None, :]
        values = tl.load(x + rows[:, None] * channels + column[None, :], mask=mask, other=0.0).to(tl.float32)
        count = tl.minimum(end - row, ROWS).to(tl.float32)
        part = tl.sum(values, 0) / count
        apart = tl.where(mask, values - part[None, :], 0.0)
        shift = part - mean
        total = seen + count
        mean += shift * (count / total)
        squares += tl.sum(apart * apart, 0) + shift * shift * (seen * count / total)
        seen = total
    tl.store(means + chunk * channels + column, mean, mask=inside)
    tl.store(deviations + chunk * channels + column, squares, mask=inside)


@triton.jit
def _batch_statistics(
    means, deviations, table, first, mean_out, scale_out, variance_out, channels, eps,
    CHUNKS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of every batch: mean, 1 / √(variance + eps), unbiased variance."""
    batch = tl.program_id(1)
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    begin = tl.load(first + batch)
    end = tl.load(first + batch + 1)
    total = tl.zeros([CHANNELS], tl.float32)
    count = 0.0
    for start in range(begin, end, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        known = chunk < end
        ends = tl.load(table + 3 * chunk + 2, mask=known, other=0)
        rows = (ends - tl.load(table + 3 * chunk + 1, mask=known, other=0)).to(tl.float32)
        at = chunk[:, None] * channels + column[None, :]
        part = tl.load(means + at, mask=known[:, None] & inside[None, :], other=0.0)
        total += tl.sum(part * rows[:, None], 0)
        count += tl.sum(rows, 0)
    mean = total / count
    squares = tl.zeros([CHANNELS], tl.float32)
    for start in range(begin, end, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        known = chunk < end
        mask = known[:, None] & inside[None, :]
        ends = tl.load(table + 3 * chunk + 2, mask=known, other=0)
        rows = (ends - tl.load(table + 3 * chunk + 1, mask=known, other=0)).to(tl.float32)
        at = chunk[:, None] * channels + column[None, :]
        shift = tl.where(mask, tl.load(means + at, mask=mask, other=0.0) - mean[None, :], 0.0)
        squares += tl.sum(tl.load(deviations + at, mask=mask, other=0.0) + shift * shift * rows[:, None], 0)
    place = batch * channels + column
    tl.store(mean_out + place, mean, mask=inside)
    tl.store(scale_out + place, 1.0 / tl.sqrt(squares / count + eps), mask=inside)
    tl.store(variance_out + place, squares / tl.maximum(count - 1.0, 1.0), mask=inside)


@triton.jit
def _running_averages(
    means, variances, running_mean, running_variance, channels, batches, momentum,
    BATCHES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Update running averages r by every batch in turn: r ← (1 − m) r + m · statistic, as one weighted sum."""
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    batch = tl.arange(0, BATCHES)
    inside = column < channels
    mask = (batch < batches)[:, None] & inside[None, :]
    logarithm = tl.log(1.0 - momentum)
    weights = tl.where(batch < batches, momentum * tl.exp((batches - 1 - batch).to(tl.float32) * logarithm), 0.0)
    kept = tl.exp(batches.to(tl.float32) * logarithm)
    at = batch[:, None] * channels + column[None, :]
    mean = tl.sum(tl.load(means + at, mask=mask, other=0.0) * weights[:, None], 0)
    variance = tl.sum(tl.load(variances + at, mask=mask, other=0.0) * weights[:, None], 0)
    mean += kept * tl.load(running_mean + column, mask=inside, other=0.0)
    variance += kept * tl.load(running_variance + column, mask=inside, other=0.0)
    tl.store(running_mean + column, mean, mask=inside)
    tl.store(running_variance + column, variance, mask=inside)


@triton.jit
def _normalise(
    x, y, weight, bias, means, scales, table, channels, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Normalise, scale and shift every chunk."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    place = tl.load(table + 3 * chunk) * channels + column
    begin = tl.load(table + 3 * chunk + 1).to(tl.int64)
    end = tl.load(table + 3 * chunk + 2).to(tl.int64)
    factor = tl.load(scales + place, mask=inside, other=0.0) * tl.load(weight + column, mask=inside, other=0.0)
    mean = tl.load(means + place, mask=inside, other=0.0)
    shift = tl.load(bias + column, mask=inside, other=0.0)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & inside[None, :]
        at = rows[:, None] * channels + column[None, :]
        values = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * factor[None, :]
        values += shift[None, :]
        if RELU:
            values = tl.maximum(values, 0.0)
        tl.store(y + at, values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _chunk_sums(
    gradient, x, y, means, scales, bias_sums, weight_sums, table, channels,
    RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum the gradient, and its product with the normalised values, over every chunk."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    place = tl.load(table + 3 * chunk) * channels + column
    begin = tl.load(table + 3 * chunk + 1).to(tl.int64)
    end = tl.load(table + 3 * chunk + 2).to(tl.int64)
    mean = tl.load(means + place, mask=inside, other=0.0)
    scale = tl.load(scales + place, mask=inside, other=0.0)
    plain = tl.zeros([CHANNELS], tl.float32)
    weighted = tl.zeros([CHANNELS], tl.float32)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & inside[None, :]
        at = rows[:, None] * channels + column[None, :]
        flow = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            flow = tl.where(tl.load(y + at, mask=mask, other=0.0).to(tl.float32) > 0.0, flow, 0.0)
        values = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        plain += tl.sum(flow, 0)
        weighted += tl.sum(tl.where(mask, flow * values, 0.0), 0)
    tl.store(bias_sums + chunk * channels + column, plain, mask=inside)
    tl.store(weight_sums + chunk * channels + column, weighted, mask=inside)


@triton.jit
def _batch_sums(
    bias_sums, weight_sums, first, bias_out, weight_out, channels, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Sum over the chunks of every batch."""
    batch = tl.program_id(1)
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    begin = tl.load(first + batch)
    end = tl.load(first + batch + 1)
    plain = tl.zeros([CHANNELS], tl.float32)
    weighted = tl.zeros([CHANNELS], tl.float32)
    for start in range(begin, end, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        mask = (chunk < end)[:, None] & inside[None, :]
        at = chunk[:, None] * channels + column[None, :]
        plain += tl.sum(tl.load(bias_sums + at, mask=mask, other=0.0), 0)
        weighted += tl.sum(tl.load(weight_sums + at, mask=mask, other=0.0), 0)
    tl.store(bias_out + batch * channels + column, plain, mask=inside)
    tl.store(weight_out + batch * channels + column, weighted, mask=inside)


@triton.jit
def _input_gradient(
    gradient, x, y, out, weight, means, scales, bias_sums, weight_sums, table, counts, channels,
    RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the images: w/σ · (g − mean(g) − x̂ · mean(g x̂))."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    batch = tl.load(table + 3 * chunk)
    place = batch * channels + column
    begin = tl.load(table + 3 * chunk + 1).to(tl.int64)
    end = tl.load(table + 3 * chunk + 2).to(tl.int64)
    count = tl.load(counts + batch).to(tl.float32)
    mean = tl.load(means + place, mask=inside, other=0.0)
    scale = tl.load(scales + place, mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=inside, other=0.0) * scale
    plain = tl.load(bias_sums + place, mask=inside, other=0.0) / count
    weighted = tl.load(weight_sums + place, mask=inside, other=0.0) / count
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & inside[None, :]
        at = rows[:, None] * channels + column[None, :]
        flow = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            flow = tl.where(tl.load(y + at, mask=mask, other=0.0).to(tl.float32) > 0.0, flow, 0.0)
        values = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        found = factor[None, :] * (flow - plain[None, :] - values * weighted[None, :])
        tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)
