"""What programs of kernels over images of several batches begin with."""

import triton
import triton.language as tl

__all__ = ["channels_of", "chunk_of", "rows_of", "scaling_of"]


@triton.jit
def channels_of(channels, CHANNELS: tl.constexpr):
    """Return the channels of a program, and which of them there are."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return channel, channel < channels


@triton.jit
def chunk_of(table):
    """Return the chunk of a program: its number, its batch, its first row and its end."""
    chunk = tl.program_id(0)
    return chunk, tl.load(table + 3 * chunk), tl.load(table + 3 * chunk + 1), tl.load(table + 3 * chunk + 2)


@triton.jit
def rows_of(row, end, inside, ROWS: tl.constexpr):
    """Return rows from this one on, and which of them and of the channels there are."""
    rows = row + tl.arange(0, ROWS)
    return rows, (rows < end)[:, None] & inside[None, :]


@triton.jit
def scaling_of(weight, bias, means, scales, batch, channels, channel, inside):
    """Return how a batch is normalised: its mean, 1/σ, w/σ and b of every channel, as rows."""
    place = batch * channels + channel
    mean = tl.load(means + place, mask=inside, other=0.0)
    scale = tl.load(scales + place, mask=inside, other=0.0)
    factor = scale * tl.load(weight + channel, mask=inside, other=0.0)
    return mean[None, :], scale, factor[None, :], tl.load(bias + channel, mask=inside, other=0.0)[None, :]
