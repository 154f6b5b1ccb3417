"""Residual networks for small images."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from spcl.errors import SpclError
from spcl.models.backbone import (
    BACKBONES,
    Initialisation,
    InputSpec,
    image_shape,
    initialise,
    initialise_he,
)


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2016) with a 3×3 stride-1 stem and a 2×2 max-pool.

    The backbone of PS-CIFAR-100 and PS-ImageNet-TINY (paper §5.2).

    Args:
        channels: Channels of the images.
        batch_norm_momentum: Weight of the newest batch in the running statistics (PyTorch's convention); the published
            networks use 0.01.
        norm_eps: ε of batch-norm; the published networks use 1e-3.
        stem_init: Initialisation of the first convolution, "glorot" in the published networks.
        residual_relu: Apply ReLU to F(x), too, before the shortcut is added, as the published networks do: a block can
            then only add to what it gets.
        width: Channels of the first stage; the last has eight times as many. Time and parameters go with its square.

    >>> import torch
    >>> model = ResNet18()
    >>> model(torch.zeros(2, 3, 32, 32)).shape, model.feature_dim
    (torch.Size([2, 512]), 512)
    >>> ResNet18(width=16).feature_dim
    128
    """

    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)

    def __init__(
        self,
        channels: int = 3,
        batch_norm_momentum: float = 0.1,
        *,
        norm_eps: float = 1e-5,
        stem_init: Initialisation = "he",
        residual_relu: bool = False,
        width: int = 64,
    ) -> None:
        super().__init__()
        if width < 1:
            raise SpclError(f"width of a residual network is {width}; give at least 1")
        norm = partial(nn.BatchNorm2d, eps=norm_eps, momentum=batch_norm_momentum)
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.stages = nn.Sequential()
        widths = width, width, 2 * width, 4 * width, 8 * width
        for (inputs, outputs), blocks in zip(pairwise(widths), self.blocks, strict=True):
            self.stages.append(_Block(inputs, outputs, 1 if inputs == outputs else 2, norm, residual_relu))
            for _ in range(blocks - 1):
                self.stages.append(_Block(outputs, outputs, 1, norm, residual_relu))
        self.feature_dim = widths[-1]
        initialise_he(self)
        if stem_init != "he":
            initialise(self.stem, stem_init)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images: the last stage averaged over positions."""
        features: Tensor = self.stages(self.stem(x))
        return features.mean(dim=(2, 3))


class ResNet34(ResNet18):
    """ResNet-34 (He et al., 2016), with the stem of :class:`ResNet18`.

    >>> import torch
    >>> ResNet34()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 512])
    """

    blocks = (3, 4, 6, 3)


class _Block(nn.Module):
    """relu(F(x) + shortcut(x)), where F is two 3×3 convolutions with batch-norm, and ReLU on top where asked for."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module], residual_relu: bool
    ) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            norm(outputs),
        )
        if residual_relu:
            self.residual.append(nn.ReLU())
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.residual(x)
        shortcut: Tensor = self.shortcut(x)
        return (residual + shortcut).relu()


@BACKBONES.register("resnet18")
def resnet18(
    inputs: InputSpec,
    batch_norm_momentum: float = 0.1,
    norm_eps: float = 1e-5,
    stem_init: Initialisation = "he",
    residual_relu: bool = False,
    width: int = 64,
) -> nn.Module:
    """ResNet-18 for small images; the network of PS-CIFAR-100 and PS-ImageNet-TINY."""
    return ResNet18(
        image_shape("resnet18", inputs)[0],
        batch_norm_momentum,
        norm_eps=norm_eps,
        stem_init=stem_init,
        residual_relu=residual_relu,
        width=width,
    )


@BACKBONES.register("resnet34")
def resnet34(inputs: InputSpec, batch_norm_momentum: float = 0.1, width: int = 64) -> nn.Module:
    """ResNet-34 for small images."""
    return ResNet34(image_shape("resnet34", inputs)[0], batch_norm_momentum, width=width)
