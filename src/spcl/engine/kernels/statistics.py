"""Kernels for the means and variances of several batches of images, and for batch-norm's running averages.

Sums are taken of differences from a value of the data itself, so that squares do not cancel where means are large.
"""

import triton
import triton.language as tl

from spcl.engine.kernels.programs import channels_of, chunk_of, rows_of

__all__ = ["batch_statistics", "chunk_statistics", "running_averages"]


@triton.jit
def chunk_statistics(x, means, deviations, table, channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute mean and squared deviations of every chunk."""
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
    """Update running averages r by every batch in turn: r ← (1 − m) r + m · statistic, as one weighted sum."""
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
