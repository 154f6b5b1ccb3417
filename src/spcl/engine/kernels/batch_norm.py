"""Batch-norm of several batches of images side by side, with the addition, ReLU and max-pooling that may follow it.

The rows of every batch are cut into chunks; each program of a kernel reads a few channels of a chunk. The autograd
function comes first, then the kernels: statistics, normalisation, normalisation with pooling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from spcl.engine.kernels.chunks import Chunks, channels_of, chunk_of, divide, divisor, power_of_two, rows_of, scaling_of

PROGRAMS = 512
"""The approximate number of programs per kernel: several per multiprocessor."""

LEAST_ROWS, MOST_ROWS = 32, 512
"""Bounds on the number of rows per chunk."""

CHANNELS, ROWS = 64, 32
"""The most channels and rows that a program holds at once."""

COMBINED = {"CHUNKS": 128, "CHANNELS": 16}
"""The most chunks and channels that a program holds at once in kernels that combine the results of chunks."""

AVERAGED = {"CHANNELS": 32}
"""The most channels that a program holds at once in the kernel that updates running averages."""


@dataclass(frozen=True)
class BatchNormOptions:
    """The options of batch-norm and of the functions that follow it.

    Attributes:
        sizes: the number of images of every batch.
        momentum, eps: options of batch-norm.
        relu: whether ReLU follows.
        pool: whether 2×2 max-pooling follows ReLU.
        add_gradients: receives the gradients of weight and bias, one row per batch.
        tables: a cache of the tables about the batches that kernels read.
    """

    sizes: tuple[int, ...]
    momentum: float
    eps: float
    relu: bool
    pool: bool
    add_gradients: Callable[[Tensor, Tensor], None]
    tables: dict[object, Any]


class _Scaling(NamedTuple):
    """The affine map of every batch, y = (x − mean) · scale · weight + bias, with scale = 1 / √(variance + eps)."""

    weight: Tensor
    bias: Tensor
    means: Tensor
    scales: Tensor


class _Sums(NamedTuple):
    """Sums over each batch or chunk: the bias's of the gradient, the weight's of gradient times normalised values."""

    bias_sums: Tensor
    weight_sums: Tensor


class BatchNorm(torch.autograd.Function):
    """``relu((x − mean) / √(variance + eps) · weight + bias + addend)`` with the mean and variance of every batch.

    Arguments: images N×C×H×W; a tensor of the same shape that is added before ReLU, or None; (weight, bias); running
    mean and variance, which are updated batch after batch, or None; options; the tensor that autograd follows in place
    of weight and bias.
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
        means, scales = _statistics(x, running, options)
        scaling = _Scaling(*parameters, means, scales)
        if options.pool:
            y = _empty_images(x, x.shape[2] // 2, x.shape[3] // 2)
            launch = _Launch(y, options)
            normalise_and_pool[launch.grid](x=x, y=y, **scaling._asdict(), **_pooled_sizes(y), **launch.common)
        else:
            addend = None if addend is None else addend.contiguous(memory_format=torch.channels_last)
            y, launch = torch.empty_like(x), _Launch(x, options)
            normalise[launch.grid](
                x=x,
                addend=x if addend is None else addend,
                y=y,
                ADD=addend is not None,
                RELU=options.relu,
                **scaling._asdict(),
                **launch.common,
            )
        ctx.adds = addend is not None
        ctx.save_for_backward(x, y if ctx.adds and options.relu else x, *scaling)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the images and the addend; hand the gradients of weight and bias to the options."""
        x, y, *saved = ctx.saved_tensors
        scaling, options = _Scaling(*saved), ctx.options
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_addend = gradient
        if options.pool:
            of_images, sums = _pooled_gradients(gradient, x, scaling, options)
        else:
            of_images, of_addend, sums = _gradients(gradient, x, y, scaling, ctx.adds, options)
        options.add_gradients(sums.weight_sums, sums.bias_sums)
        return of_images, of_addend if ctx.adds else None, None, None, None, None


class _Launch:
    """The programs of a kernel over the rows of images.

    Attributes:
        chunks: the rows of every batch, cut into chunks.
        grid: the number of chunks, and of blocks of channels; there is a program for each pair.
        common: the arguments of all kernels over chunks: their table, all channels, a program's rows and channels.
        combined: the grid of a kernel that combines the chunks of every batch.
    """

    def __init__(self, images: Tensor, options: BatchNormOptions) -> None:
        count, channels, height, width = images.shape
        block = min(CHANNELS, power_of_two(channels))
        columns = triton.cdiv(channels, block)
        most_rows = power_of_two(count * height * width * columns // PROGRAMS)
        most_rows = min(MOST_ROWS, max(LEAST_ROWS, most_rows))
        rows = tuple(size * height * width for size in options.sizes)
        self.chunks = Chunks.of(rows, most_rows, images.device, options.tables)
        self.grid = self.chunks.count, columns
        self.common: dict[str, Any] = {"table": self.chunks.table, "channels": channels}
        self.common |= {"ROWS": ROWS, "CHANNELS": block}
        self.combined = triton.cdiv(channels, COMBINED["CHANNELS"]), len(options.sizes)

    def two_per_chunk(self) -> Tensor:
        """Return memory for two numbers per chunk and channel."""
        return torch.empty(2, self.chunks.count, self.common["channels"], device=self.chunks.table.device)


def _statistics(x: Tensor, running: tuple[Tensor, Tensor] | None, options: BatchNormOptions) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / √(variance + eps) of every batch; update the running averages."""
    channels, batches, launch = x.shape[1], len(options.sizes), _Launch(x, options)
    chunks = launch.chunks
    means, deviations = launch.two_per_chunk()
    mean_out, scale_out, variance_out = torch.empty(3, batches, channels, device=x.device)
    chunk_statistics[launch.grid](x=x, means=means, deviations=deviations, **launch.common)
    batch_statistics[launch.combined](
        means=means,
        deviations=deviations,
        table=chunks.table,
        first=chunks.first,
        mean_out=mean_out,
        scale_out=scale_out,
        variance_out=variance_out,
        channels=channels,
        eps=options.eps,
        **COMBINED,
    )
    if running is not None:
        grid = (triton.cdiv(channels, AVERAGED["CHANNELS"]),)
        running_averages[grid](
            means=mean_out,
            variances=variance_out,
            running_mean=running[0],
            running_variance=running[1],
            channels=channels,
            batches=batches,
            momentum=options.momentum,
            BATCHES=power_of_two(batches),
            **AVERAGED,
        )
    return mean_out, scale_out


def _gradients(
    gradient: Tensor, x: Tensor, y: Tensor, scaling: _Scaling, adds: bool, options: BatchNormOptions
) -> tuple[Tensor, Tensor, _Sums]:
    """Return the gradient of the images, the gradient before ReLU, and its sums over every batch."""
    launch = _Launch(x, options)
    partial = _Sums(*launch.two_per_chunk())
    is_stored = adds and options.relu
    before_relu, of_images = torch.empty_like(x) if is_stored else gradient, torch.empty_like(x)
    chunk_sums[launch.grid](
        gradient=gradient,
        x=x,
        y=y,
        masked=before_relu,
        ADD=adds,
        RELU=options.relu,
        **scaling._asdict(),
        **partial._asdict(),
        **launch.common,
    )
    sums = _batch_sums(partial, launch)
    input_gradient[launch.grid](
        gradient=before_relu,
        x=x,
        out=of_images,
        counts=launch.chunks.rows,
        RELU=options.relu and not is_stored,
        **scaling._asdict(),
        **sums._asdict(),
        **launch.common,
    )
    return of_images, before_relu, sums


def _pooled_gradients(
    gradient: Tensor, x: Tensor, scaling: _Scaling, options: BatchNormOptions
) -> tuple[Tensor, _Sums]:
    """Return the gradient of the images, and the sums over every batch of the gradient before ReLU."""
    launch = _Launch(gradient, options)
    of_images, partial = torch.empty_like(x), _Sums(*launch.two_per_chunk())
    common = {"gradient": gradient, "x": x, **scaling._asdict(), **_pooled_sizes(gradient), **launch.common}
    pooled_sums[launch.grid](**partial._asdict(), **common)
    sums = _batch_sums(partial, launch)
    pooled_input_gradient[launch.grid](out=of_images, counts=launch.chunks.rows, **sums._asdict(), **common)
    return of_images, sums


def _batch_sums(partial: _Sums, launch: _Launch) -> _Sums:
    """Add up the sums of the chunks of every batch."""
    channels = launch.common["channels"]
    sums = _Sums(*torch.empty(2, launch.combined[1], channels, device=partial.bias_sums.device))
    batch_sums[launch.combined](
        **partial._asdict(),
        first=launch.chunks.first,
        bias_out=sums.bias_sums,
        weight_out=sums.weight_sums,
        channels=channels,
        **COMBINED,
    )
    return sums


def _pooled_sizes(pooled: Tensor) -> dict[str, int]:
    """Return the width of pooled images, and the factor and shift by which kernels divide by it."""
    factor, shift = divisor(pooled.shape[3])
    return {"width": pooled.shape[3], "width_factor": factor, "width_shift": shift}


def _empty_images(like: Tensor, height: int, width: int) -> Tensor:
    shape = (len(like), like.shape[1], height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


# -- kernels: means and variances. One value of the data is subtracted before summing, so that squares do not cancel if
# -- means are large.


@triton.jit
def chunk_statistics(x, means, deviations, table, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute the mean and the sum of squared deviations of every chunk."""
    column, inside = channels_of(channels, CHANNELS)
    chunk, _, begin, end = chunk_of(table)
    first = tl.load(x + begin * channels + column, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for row in range(begin, end, ROWS):
        rows, mask = rows_of(row, end, inside, ROWS)
        values = tl.load(x + rows[:, None] * channels + column[None, :], mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(mask, values - first[None, :], 0.0)
        sums += centred
        squares += centred * centred
    count = (end - begin).to(tl.float32)
    shift = tl.sum(sums, 0) / count
    deviation = tl.maximum(tl.sum(squares, 0) - shift * shift * count, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(means + chunk * channels + column, first + shift, mask=inside)
    tl.store(deviations + chunk * channels + column, deviation, mask=inside)


@triton.jit
def batch_statistics(
    means, deviations, table, first, mean_out, scale_out, variance_out, channels, eps,
    CHUNKS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of every batch: mean, 1 / √(variance + eps), unbiased variance."""
    batch = tl.program_id(1)
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    begin = tl.load(first + batch)
    end = tl.load(first + batch + 1)
    one = tl.load(means + begin * channels + column, mask=inside, other=0.0)
    sums = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    squares = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    counts = tl.zeros([CHUNKS], tl.float32)
    for start in range(begin, end, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        known = chunk < end
        mask = known[:, None] & inside[None, :]
        ends = tl.load(table + 3 * chunk + 2, mask=known, other=0)
        rows = (ends - tl.load(table + 3 * chunk + 1, mask=known, other=0)).to(tl.float32)
        at = chunk[:, None] * channels + column[None, :]
        shift = tl.where(mask, tl.load(means + at, mask=mask, other=0.0) - one[None, :], 0.0)
        sums += shift * rows[:, None]
        squares += tl.load(deviations + at, mask=mask, other=0.0) + shift * shift * rows[:, None]
        counts += rows
    count = tl.sum(counts, 0)
    centred = tl.sum(sums, 0) / count
    total = tl.maximum(tl.sum(squares, 0) - centred * centred * count, 0.0, propagate_nan=tl.PropagateNan.ALL)
    place = batch * channels + column
    tl.store(mean_out + place, one + centred, mask=inside)
    tl.store(scale_out + place, 1.0 / tl.sqrt(total / count + eps), mask=inside)
    tl.store(variance_out + place, total / tl.maximum(count - 1.0, 1.0), mask=inside)


@triton.jit
def running_averages(
    means, variances, running_mean, running_variance, channels, batches, momentum,
    BATCHES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Update running averages r by every batch in turn, r ← (1 − m) r + m · statistic, as one weighted sum."""
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    batch = tl.arange(0, BATCHES)
    inside = column < channels
    mask = (batch < batches)[:, None] & inside[None, :]
    logarithm = tl.log(1.0 - momentum)
    later = (batches - 1 - batch).to(tl.float32)
    weights = tl.where(later > 0.0, momentum * tl.exp(later * logarithm), momentum)
    weights = tl.where(batch < batches, weights, 0.0)
    kept = tl.exp(logarithm * batches)
    at = batch[:, None] * channels + column[None, :]
    mean = tl.sum(tl.load(means + at, mask=mask, other=0.0) * weights[:, None], 0)
    variance = tl.sum(tl.load(variances + at, mask=mask, other=0.0) * weights[:, None], 0)
    mean += kept * tl.load(running_mean + column, mask=inside, other=0.0)
    variance += kept * tl.load(running_variance + column, mask=inside, other=0.0)
    tl.store(running_mean + column, mean, mask=inside)
    tl.store(running_variance + column, variance, mask=inside)


# -- kernels: normalisation and its gradient


@triton.jit
def normalise(
    x, addend, y, weight, bias, means, scales, table, channels,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Normalise, scale and shift every chunk; add the addend; apply ReLU."""
    column, inside = channels_of(channels, CHANNELS)
    _, batch, begin, end = chunk_of(table)
    mean, _, factor, shift = scaling_of(weight, bias, means, scales, batch, channels, column, inside)
    for row in range(begin, end, ROWS):
        rows, mask = rows_of(row, end, inside, ROWS)
        at = rows[:, None] * channels + column[None, :]
        values = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean) * factor
        values += shift
        if ADD:
            values += tl.load(addend + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            values = tl.where(values < 0.0, 0.0, values)
        tl.store(y + at, values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def chunk_sums(
    gradient, x, y, masked, weight, bias, means, scales, bias_sums, weight_sums, table, channels,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum the gradient before ReLU, and its product with the normalised values, over every chunk.

    With an addend the gradient before ReLU is stored in ``masked``, because it is the addend's gradient, too. Without
    an addend the sign of the result is recomputed from the images, which is faster than reading it.
    """
    column, inside = channels_of(channels, CHANNELS)
    chunk, batch, begin, end = chunk_of(table)
    mean, scale, factor, shift = scaling_of(weight, bias, means, scales, batch, channels, column, inside)
    gradient_sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    product_sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    for row in range(begin, end, ROWS):
        rows, mask = rows_of(row, end, inside, ROWS)
        at = rows[:, None] * channels + column[None, :]
        grad = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        centred = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        if RELU and ADD:
            grad = tl.where(tl.load(y + at, mask=mask, other=0.0).to(tl.float32) > 0.0, grad, 0.0)
            tl.store(masked + at, grad.to(masked.dtype.element_ty), mask=mask)
        elif RELU:
            grad = tl.where(centred * factor + shift > 0.0, grad, 0.0)
        gradient_sums += grad
        product_sums += tl.where(mask, grad * centred, 0.0)
    at = chunk * channels + column
    tl.store(bias_sums + at, tl.sum(gradient_sums, 0), mask=inside)
    tl.store(weight_sums + at, tl.sum(product_sums, 0) * scale, mask=inside)


@triton.jit
def batch_sums(
    bias_sums, weight_sums, first, bias_out, weight_out, channels, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Add up the sums of the chunks of every batch."""
    batch = tl.program_id(1)
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    begin = tl.load(first + batch)
    end = tl.load(first + batch + 1)
    gradient_sums = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    product_sums = tl.zeros([CHUNKS, CHANNELS], tl.float32)
    for start in range(begin, end, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        mask = (chunk < end)[:, None] & inside[None, :]
        at = chunk[:, None] * channels + column[None, :]
        gradient_sums += tl.load(bias_sums + at, mask=mask, other=0.0)
        product_sums += tl.load(weight_sums + at, mask=mask, other=0.0)
    tl.store(bias_out + batch * channels + column, tl.sum(gradient_sums, 0), mask=inside)
    tl.store(weight_out + batch * channels + column, tl.sum(product_sums, 0), mask=inside)


@triton.jit
def input_gradient(
    gradient, x, out, weight, bias, means, scales, bias_sums, weight_sums, table, counts, channels,
    RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the images, w/σ · (g − mean(g) − x̂ · mean(g x̂)), from the gradient g before ReLU."""
    column, inside = channels_of(channels, CHANNELS)
    _, batch, begin, end = chunk_of(table)
    mean, scale, factor, shift = scaling_of(weight, bias, means, scales, batch, channels, column, inside)
    place, count = batch * channels + column, tl.load(counts + batch).to(tl.float32)
    mean_gradient = tl.load(bias_sums + place, mask=inside, other=0.0) / count
    mean_product = tl.load(weight_sums + place, mask=inside, other=0.0) / count * scale
    for row in range(begin, end, ROWS):
        rows, mask = rows_of(row, end, inside, ROWS)
        at = rows[:, None] * channels + column[None, :]
        grad = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        centred = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        if RELU:
            grad = tl.where(centred * factor + shift > 0.0, grad, 0.0)
        found = factor * (grad - mean_gradient[None, :] - centred * mean_product[None, :])
        tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)


# -- kernels: normalisation, ReLU and 2×2 max-pooling. The backward pass recomputes normalised values, which are not
# -- stored, to find the largest pixel. Like PyTorch's max-pooling, it compares pixels in the type of the images and
# -- takes the first of equal pixels.


@triton.jit
def _first_pixels(rows, width, factor, shift):
    """Return, for each row of the result, the row of the upper left of its 2×2 pixels; ``width`` is the result's."""
    return 2 * rows + 2 * width * divide(rows, factor, shift)


@triton.jit
def _four(at, mask, mean, channels, width):
    """Return the four pixels minus the mean."""
    below = at + 2 * width * channels
    x0 = tl.load(at, mask=mask, other=0.0).to(tl.float32) - mean
    x1 = tl.load(at + channels, mask=mask, other=0.0).to(tl.float32) - mean
    x2 = tl.load(below, mask=mask, other=0.0).to(tl.float32) - mean
    x3 = tl.load(below + channels, mask=mask, other=0.0).to(tl.float32) - mean
    return x0, x1, x2, x3


@triton.jit
def _larger(values, number: tl.constexpr, best, winner):
    """Return the larger of ``values`` and ``best``, and the number of its pixel."""
    is_larger = values > best
    return tl.where(is_larger, values, best), tl.where(is_larger, number, winner)


@triton.jit
def _winners(x0, x1, x2, x3, factor, shift, TYPE: tl.constexpr):
    """Return the largest normalised pixel, rounded to a type, and its number; x0 to x3 are pixels minus the mean."""
    best = (x0 * factor + shift).to(TYPE).to(tl.float32)
    winner = tl.zeros(best.shape, tl.int32)
    best, winner = _larger((x1 * factor + shift).to(TYPE).to(tl.float32), 1, best, winner)
    best, winner = _larger((x2 * factor + shift).to(TYPE).to(tl.float32), 2, best, winner)
    best, winner = _larger((x3 * factor + shift).to(TYPE).to(tl.float32), 3, best, winner)
    return best, winner


@triton.jit
def normalise_and_pool(
    x, y, weight, bias, means, scales, table, channels, width, width_factor, width_shift,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the result; chunks contain rows of the result, and ``width`` is the result's."""
    column, inside = channels_of(channels, CHANNELS)
    _, batch, begin, end = chunk_of(table)
    mean, _, factor, shift = scaling_of(weight, bias, means, scales, batch, channels, column, inside)
    for row in range(begin, end, ROWS):
        rows, mask = rows_of(row, end, inside, ROWS)
        at = x + _first_pixels(rows, width, width_factor, width_shift)[:, None] * channels + column[None, :]
        x0, x1, x2, x3 = _four(at, mask, mean, channels, width)
        best = _winners(x0, x1, x2, x3, factor, shift, y.dtype.element_ty)[0]
        result = tl.where(best < 0.0, 0.0, best)
        tl.store(y + rows[:, None] * channels + column[None, :], result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def pooled_sums(
    gradient, x, weight, bias, means, scales, bias_sums, weight_sums, table, channels, width, width_factor, width_shift,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum the gradient before ReLU, and its product with the normalised largest pixels, over every chunk."""
    column, inside = channels_of(channels, CHANNELS)
    chunk, batch, begin, end = chunk_of(table)
    mean, scale, factor, shift = scaling_of(weight, bias, means, scales, batch, channels, column, inside)
    gradient_sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    product_sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    for row in range(begin, end, ROWS):
        rows, mask = rows_of(row, end, inside, ROWS)
        at = x + _first_pixels(rows, width, width_factor, width_shift)[:, None] * channels + column[None, :]
        x0, x1, x2, x3 = _four(at, mask, mean, channels, width)
        best, winner = _winners(x0, x1, x2, x3, factor, shift, x.dtype.element_ty)
        of = tl.where(winner == 0, x0, tl.where(winner == 1, x1, tl.where(winner == 2, x2, x3)))
        grad = tl.load(gradient + rows[:, None] * channels + column[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.where(best > 0.0, grad, 0.0)
        gradient_sums += grad
        product_sums += tl.where(mask, grad * of, 0.0)
    at = chunk * channels + column
    tl.store(bias_sums + at, tl.sum(gradient_sums, 0), mask=inside)
    tl.store(weight_sums + at, tl.sum(product_sums, 0) * scale, mask=inside)


@triton.jit
def pooled_input_gradient(
    gradient, x, out, weight, bias, means, scales, bias_sums, weight_sums, table, counts, channels, width,
    width_factor, width_shift, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the images as :func:`input_gradient` does; g = 0 where a pixel is not the largest."""
    column, inside = channels_of(channels, CHANNELS)
    _, batch, begin, end = chunk_of(table)
    mean, scale, factor, shift = scaling_of(weight, bias, means, scales, batch, channels, column, inside)
    place, count = batch * channels + column, 4.0 * tl.load(counts + batch).to(tl.float32)
    mean_gradient = (tl.load(bias_sums + place, mask=inside, other=0.0) / count)[None, :]
    mean_product = (tl.load(weight_sums + place, mask=inside, other=0.0) / count * scale)[None, :]
    below = 2 * width * channels
    for row in range(begin, end, ROWS):
        rows, mask = rows_of(row, end, inside, ROWS)
        at = _first_pixels(rows, width, width_factor, width_shift)[:, None] * channels + column[None, :]
        x0, x1, x2, x3 = _four(x + at, mask, mean, channels, width)
        best, winner = _winners(x0, x1, x2, x3, factor, shift, x.dtype.element_ty)
        grad = tl.load(gradient + rows[:, None] * channels + column[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.where(best > 0.0, grad, 0.0)
        d0 = factor * (tl.where(winner == 0, grad, 0.0) - mean_gradient - x0 * mean_product)
        d1 = factor * (tl.where(winner == 1, grad, 0.0) - mean_gradient - x1 * mean_product)
        d2 = factor * (tl.where(winner == 2, grad, 0.0) - mean_gradient - x2 * mean_product)
        d3 = factor * (tl.where(winner == 3, grad, 0.0) - mean_gradient - x3 * mean_product)
        to = out + at
        tl.store(to, d0.to(out.dtype.element_ty), mask=mask)
        tl.store(to + channels, d1.to(out.dtype.element_ty), mask=mask)
        tl.store(to + below, d2.to(out.dtype.element_ty), mask=mask)
        tl.store(to + below + channels, d3.to(out.dtype.element_ty), mask=mask)
