"""Backbones shared by all tasks: modules with an attribute `feature_dim`, the number of features that they return."""

from spcl.models.backbone import BACKBONES, Backbone, InputSpec, Normalise, Standardise
from spcl.models.cnn import SmallCNN
from spcl.models.libraries import FeatureExtractor
from spcl.models.mlp import MLP
from spcl.models.ngrams import Ngrams
from spcl.models.resnet import ResNet18, ResNet34
from spcl.models.series import SeriesCNN, SeriesGRU
from spcl.models.transformer import TextTransformer, VisionTransformer

__all__ = [
    "BACKBONES",
    "MLP",
    "Backbone",
    "FeatureExtractor",
    "InputSpec",
    "Ngrams",
    "Normalise",
    "ResNet18",
    "ResNet34",
    "SeriesCNN",
    "SeriesGRU",
    "SmallCNN",
    "Standardise",
    "TextTransformer",
    "VisionTransformer",
]
