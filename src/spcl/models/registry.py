"""Backbones by name: functions that build a network for given inputs."""

import math
from collections.abc import Callable, Sequence

from torch import nn

from spcl._util.registry import Registry
from spcl.errors import SpclError
from spcl.models.backbone import Backbone, Initialisation, InputSpec, Standardise
from spcl.models.cnn import SmallCNN
from spcl.models.mlp import MLP
from spcl.models.ngrams import Ngrams
from spcl.models.resnet import ResNet18, ResNet34
from spcl.models.series import SeriesCNN, SeriesGRU
from spcl.models.transformer import TextTransformer, VisionTransformer

BACKBONES: Registry[Callable[..., nn.Module]] = Registry(
    "backbone", nn.Module, positional=1, keywords=("batch_norm_momentum",)
)
"""Functions ``make(inputs, **options)`` of a network; ``inputs`` is an :class:`InputSpec`.

The network returns features of shape (batch, features), and has their number as the attribute ``feature_dim`` if it can
be known before the first batch.

>>> import torch
>>> BACKBONES.make({"name": "mlp", "hidden": [32, 16]}, InputSpec((28, 28), torch.float32)).feature_dim
16
"""


@BACKBONES.register("mlp")
def mlp(
    inputs: InputSpec, hidden: Sequence[int] = (128, 64), init: Initialisation = "he", standardise: bool = False
) -> nn.Module:
    """Fully connected layers, for samples of any shape; the network of PS-EMNIST.

    With ``standardise``, floating-point features are standardised first, see :class:`spcl.models.Standardise`.
    """
    network = MLP(math.prod(inputs.shape), hidden, init)
    return _standardised(inputs, network) if standardise and inputs.dtype.is_floating_point else network


@BACKBONES.register("cnn")
def cnn(inputs: InputSpec, init: Initialisation = "he") -> nn.Module:
    """Three convolutions and a linear layer; the network of Toy-CIFAR-10."""
    channels, *size = _image_shape("cnn", inputs)
    return SmallCNN(channels, (size[0], size[1]), init)


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
        _image_shape("resnet18", inputs)[0],
        batch_norm_momentum,
        norm_eps=norm_eps,
        stem_init=stem_init,
        residual_relu=residual_relu,
        width=width,
    )


@BACKBONES.register("resnet34")
def resnet34(inputs: InputSpec, batch_norm_momentum: float = 0.1, width: int = 64) -> nn.Module:
    """ResNet-34 for small images."""
    return ResNet34(_image_shape("resnet34", inputs)[0], batch_norm_momentum, width=width)


@BACKBONES.register("vit")
def vit(inputs: InputSpec, patch: int = 4, width: int = 192, depth: int = 6, heads: int = 3) -> nn.Module:
    """Vision transformer for small images."""
    channels, *size = _image_shape("vit", inputs)
    return VisionTransformer(channels, (size[0], size[1]), patch=patch, width=width, depth=depth, heads=heads)


@BACKBONES.register("text")
def text(inputs: InputSpec, width: int = 64, depth: int = 2, heads: int = 4) -> nn.Module:
    """Transformer for token sequences, or for ``input_ids`` with an ``attention_mask``."""
    tokens = inputs if inputs.parts is None else inputs.parts.get("input_ids", inputs)
    if tokens.vocabulary is None or len(tokens.shape) != 1:
        raise SpclError(f"backbone 'text' needs token sequences of integers, but the samples are {inputs}")
    return TextTransformer(tokens.vocabulary, tokens.shape[0], width=width, depth=depth, heads=heads)


@BACKBONES.register("ngrams")
def ngrams(inputs: InputSpec, rows: int = 8192, width: int = 128) -> nn.Module:
    """Hashed words and pairs of words, for short texts as token sequences; the network of CLINC150."""
    tokens = inputs if inputs.parts is None else inputs.parts.get("input_ids", inputs)
    if tokens.vocabulary is None or len(tokens.shape) != 1:
        raise SpclError(f"backbone 'ngrams' needs token sequences of integers, but the samples are {inputs}")
    return Ngrams(rows, width)


@BACKBONES.register("conv1d")
def conv1d(inputs: InputSpec, width: int = 64, init: Initialisation = "he", standardise: bool = True) -> nn.Module:
    """Three convolutions over time and a linear layer, for series of time × channels."""
    network = SeriesCNN(_series_channels("conv1d", inputs), width, init)
    return _standardised(inputs, network) if standardise else network


@BACKBONES.register("gru")
def gru(inputs: InputSpec, width: int = 64, standardise: bool = True) -> nn.Module:
    """Gated recurrent unit, for series of time × channels; every source takes a pass of its own."""
    network = SeriesGRU(_series_channels("gru", inputs), width)
    return _standardised(inputs, network) if standardise else network


def _standardised(inputs: InputSpec, network: nn.Module) -> nn.Module:
    return Backbone(Standardise(inputs.shape[-1]), network)


def _series_channels(name: str, inputs: InputSpec) -> int:
    if len(inputs.shape) != 2 or inputs.parts is not None or not inputs.dtype.is_floating_point:
        raise SpclError(f"backbone {name!r} needs series of numbers, time × channels, but the samples are {inputs}")
    return inputs.shape[1]


def _image_shape(name: str, inputs: InputSpec) -> tuple[int, ...]:
    if len(inputs.shape) != 3 or inputs.parts is not None:
        raise SpclError(f"backbone {name!r} needs images, channels × height × width, but the samples are {inputs}")
    return inputs.shape
