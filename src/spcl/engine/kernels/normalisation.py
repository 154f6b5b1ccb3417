"""Kernels that normalise images of several batches, each by its own statistics, and their gradients.

With ReLU in the same pass over the images, and with another tensor added before it. Where ReLU was is computed again
from the images where nothing is added, which is faster than to read it.
"""

import triton
import triton.language as tl

from spcl.engine.kernels.programs import channels_of, chunk_of, rows_of, scaling_of

__all__ = ["batch_sums", "chunk_sums", "input_gradient", "normalise"]


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
    """Sum the gradient, and its product with the normalised values, over every chunk.

    With an addend, whose gradient it is too, the gradient behind ReLU is stored.
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
    """Sum over the chunks of every batch."""
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
    """Compute the gradient of the images: w/σ · (g − mean(g) − x̂ · mean(g x̂)); g is that behind ReLU."""
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
