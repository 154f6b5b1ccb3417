"""Kernels that normalise images, apply ReLU and keep the largest of every 2×2 pixels, and their gradients.

What is normalised is not stored. The backward pass normalises again to find which pixel was the largest: the first one
of equal ones, compared in the type of the images, as max-pooling does.
"""

import triton
import triton.language as tl

from spcl.engine.kernels.division import divide
from spcl.engine.kernels.programs import channels_of, chunk_of, rows_of, scaling_of

__all__ = ["normalise_and_pool", "pooled_input_gradient", "pooled_sums"]


@triton.jit
def _first_pixels(rows, width, factor, shift):
    """Return the row of the first of the 2×2 pixels that every row of the result, of images so wide, stands for."""
    return 2 * rows + 2 * width * divide(rows, factor, shift)


@triton.jit
def _four(at, mask, mean, channels, width):
    """Return the four pixels, apart from the mean."""
    below = at + 2 * width * channels
    x0 = tl.load(at, mask=mask, other=0.0).to(tl.float32) - mean
    x1 = tl.load(at + channels, mask=mask, other=0.0).to(tl.float32) - mean
    x2 = tl.load(below, mask=mask, other=0.0).to(tl.float32) - mean
    x3 = tl.load(below + channels, mask=mask, other=0.0).to(tl.float32) - mean
    return x0, x1, x2, x3


@triton.jit
def _larger(values, number: tl.constexpr, best, winner):
    """Return the larger values, and the number of their pixel."""
    is_larger = values > best
    return tl.where(is_larger, values, best), tl.where(is_larger, number, winner)


@triton.jit
def _winners(x0, x1, x2, x3, factor, shift, TYPE: tl.constexpr):
    """Return the results, rounded to a type, and which pixel each is of; x are apart from the mean."""
    best = (x0 * factor + shift).to(TYPE).to(tl.float32)
    winner = tl.zeros(best.shape, tl.int32)
    best, winner = _larger((x1 * factor + shift).to(TYPE).to(tl.float32), 1, best, winner)
    best, winner = _larger((x2 * factor + shift).to(TYPE).to(tl.float32), 2, best, winner)
    best, winner = _larger((x3 * factor + shift).to(TYPE).to(tl.float32), 3, best, winner)
    return best, winner


@triton.jit
def normalise_and_pool(
    x,
    y,
    weight,
    bias,
    means,
    scales,
    table,
    channels,
    width,
    width_factor,
    width_shift,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute the result of every chunk, which is one of rows of the result; `width` is its images'."""
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
    """Sum the gradient, and its product with the normalised values that it belongs to, over every chunk."""
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
    """Compute the gradient of the images as :func:`input_gradient` does; g is zero where a pixel is not the largest."""
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
