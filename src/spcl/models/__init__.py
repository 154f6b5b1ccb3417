"""Backbones shared by all tasks: modules whose attribute `feature_dim` is the length of their output."""

from spcl.models.backbone import Backbone
from spcl.models.cnn import SmallCNN
from spcl.models.mlp import MLP
from spcl.models.normalise import Normalise
from spcl.models.resnet import ResNet18

__all__ = ["MLP", "Backbone", "Normalise", "ResNet18", "SmallCNN"]
