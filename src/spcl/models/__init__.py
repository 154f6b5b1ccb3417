"""Backbones shared by all tasks: modules whose attribute `feature_dim` is the length of their output."""

from spcl.models.backbone import Backbone
from spcl.models.cnn import SmallCNN
from spcl.models.input_spec import InputSpec
from spcl.models.libraries import FeatureExtractor
from spcl.models.mlp import MLP
from spcl.models.normalise import Normalise
from spcl.models.registry import BACKBONES
from spcl.models.resnet import ResNet18, ResNet34
from spcl.models.text import TextTransformer
from spcl.models.vit import VisionTransformer

__all__ = [
    "BACKBONES",
    "MLP",
    "Backbone",
    "FeatureExtractor",
    "InputSpec",
    "Normalise",
    "ResNet18",
    "ResNet34",
    "SmallCNN",
    "TextTransformer",
    "VisionTransformer",
]
