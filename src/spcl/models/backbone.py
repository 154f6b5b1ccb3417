"""Parts around a network: a sequence of modules as one backbone, and the conversion of bytes to normalised floats."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spcl.errors import SpclError


class Backbone(nn.Sequential):
    """A sequence of modules with the `feature_dim` of the last one, or None if that has none.

    >>> from spcl.models import MLP, Normalise
    >>> Backbone(Normalise(mean=0.13, std=0.31), MLP(784)).feature_dim
    64
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.feature_dim: int | None = getattr(modules[-1], "feature_dim", None)


class Normalise(nn.Module):
    """Normalisation `(x / 255 - mean) / std` in float32, for bytes or floats from 0 to 255.

    Args:
        mean: Mean of the data scaled to 0 … 1: one number, or one per channel (dimension 1).
        std: Standard deviation of the data scaled to 0 … 1, likewise.

    >>> Normalise(mean=0.5, std=0.25)(torch.tensor([[0, 51, 255]], dtype=torch.uint8))
    tensor([[-2.0000, -1.2000,  2.0000]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).flatten())
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).flatten())
        if self.mean.shape != self.std.shape or not bool((self.std > 0).all()):
            raise SpclError(f"mean is {mean} and std {std}; give equally many of both, and every std positive")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch; dimension 1 holds the channels."""
        shape = (-1,) + (1,) * (x.dim() - 2)
        return (x.to(torch.float32) / 255 - self.mean.view(shape)) / self.std.view(shape)
