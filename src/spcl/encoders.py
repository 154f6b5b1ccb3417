"""Encoders by name: modules of a source's own in front of the backbone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spcl._util.registry import Registry
from spcl.batches import Inputs, describe
from spcl.errors import TaskError


class Affine(nn.Module):
    r"""A scale and a shift of every feature or channel, :math:`x \mapsto s \odot x + b`; the identity at first.

    Each source that gets one adapts the inputs to what the shared backbone has learned from others, e.g. a sensor that
    is worn differently. For a source that was never trained the identity stands in its place.

    Args:
        features: the size of the inputs' first dimension after the batch: of vectors the features, of images and
            series the channels.
        dimensions: the number of dimensions after that: 0 for vectors, 1 for series, 2 for images.

    >>> Affine(2)(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 2.]], grad_fn=<AddBackward0>)
    """

    def __init__(self, features: int, dimensions: int = 0) -> None:
        super().__init__()
        shape = (features, *[1] * dimensions)
        self.scale = nn.Parameter(torch.ones(shape))
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled and shifted inputs."""
        return x * self.scale + self.shift


ENCODERS: Registry[Callable[[Inputs], nn.Module]] = Registry("encoder", nn.Module, positional=1)
"""Encoders by name: functions of a first batch of inputs. At first they must be the identity."""


@ENCODERS.register("affine")
def make_affine(x: Inputs) -> nn.Module:
    """Return an :class:`Affine` that fits inputs.

    >>> make_affine(torch.zeros(8, 3, 32, 32)).scale.shape
    torch.Size([3, 1, 1])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        raise TaskError(
            f"the encoder 'affine' needs one tensor of numbers per sample, but the inputs are {describe(x)}"
        )
    return Affine(x.shape[1], x.ndim - 2)
