"""Transforms of batches of inputs: random augmentation on the inputs' device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from spcl._util.registry import Named, Registry
from spcl.errors import SpclError

__all__ = ["TRANSFORMS", "Compose", "Crop", "Flip", "Transform", "compose"]

Transform: TypeAlias = Callable[[Any], Any]
"""A function of the inputs of a whole batch, which are a tensor or a dict or tuple of tensors.

The images of a run are bytes 0…255 (uint8), as stored; a transform must return numbers in this range (bytes or floats),
because the backbone normalises them afterwards. Random numbers come from PyTorch's generator of the batch's device. An
attribute ``capturable = True`` says that the transform decides nothing on the host, so a CUDA graph can replay it.
"""

TRANSFORMS: Registry[Callable[..., Transform]] = Registry("transform")
"""Transforms by name: factories with options."""


@TRANSFORMS.register("flip")
@dataclass(frozen=True)
class Flip:
    """Flips images horizontally, each with probability ``p``.

    >>> images = torch.arange(3).view(1, 1, 1, 3)
    >>> TRANSFORMS.make({"name": "flip", "p": 1.0})(images)
    tensor([[[[2, 1, 0]]]])
    """

    capturable: ClassVar[bool] = True
    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise SpclError(f"p is {self.p!r}; give the probability of a flip, from 0 to 1")

    def __call__(self, x: Tensor) -> Tensor:
        """Return the images, some of them flipped."""
        _check_images(x, "flip")
        is_flipped = torch.rand(len(x), 1, 1, 1, device=x.device) < self.p
        return torch.where(is_flipped, x.flip(-1), x)


@TRANSFORMS.register("crop")
@dataclass(frozen=True)
class Crop:
    """Shifts images at random: pads them with zeros on all sides and crops each to its former size at a random place.

    >>> _ = torch.manual_seed(0)
    >>> TRANSFORMS.make({"name": "crop", "padding": 1})(torch.tensor([[[[1, 2], [3, 4]]]]))
    tensor([[[[0, 3],
              [0, 0]]]])
    """

    capturable: ClassVar[bool] = True
    padding: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.padding, int) or self.padding < 1:
            raise SpclError(f"padding is {self.padding!r}; give a positive whole number of pixels")

    def __call__(self, x: Tensor) -> Tensor:
        """Return the images, each shifted by at most ``padding`` pixels in either direction."""
        _check_images(x, "crop")
        top, left = torch.randint(2 * self.padding + 1, (2, len(x)), device=x.device)
        windows = pad(x, [self.padding] * 4).unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
        return windows[torch.arange(len(x), device=x.device), :, top, left]


@dataclass(frozen=True)
class Compose:
    """One transform after another."""

    transforms: Sequence[Transform]

    @property
    def capturable(self) -> bool:
        """Whether no transform decides anything on the host."""
        return all(getattr(transform, "capturable", False) is True for transform in self.transforms)

    def __call__(self, x: Any) -> Any:
        """Return the inputs after all transforms."""
        for transform in self.transforms:
            x = transform(x)
        return x


def compose(transforms: Sequence[Named]) -> Compose:
    """Return the transforms of these names, one after another.

    >>> compose([{"name": "crop", "padding": 2}, "flip"])
    Compose(transforms=(Crop(padding=2), Flip(p=0.5)))
    """
    return Compose(tuple(TRANSFORMS.make(each) for each in transforms))


def _check_images(x: Tensor, name: str) -> None:
    if not isinstance(x, Tensor) or x.ndim != 4:
        found = f"of shape {tuple(x.shape[1:])}" if isinstance(x, Tensor) else f"in a {type(x).__name__}"
        raise SpclError(
            f"the transform {name!r} is for images (channels, height, width), but the samples are {found}; "
            f"omit it, or give a function that transforms such samples"
        )
