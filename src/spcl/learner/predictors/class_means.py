"""Nearest class mean."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from spcl.learner.predictors.base import PREDICTORS, ClassPredictor, StoredFeatures

__all__ = ["ClassMeanHead", "ClassMeans"]

SHARPNESS = 16.0
"""Factor of the cosines, which decides probabilities and no prediction."""


class ClassMeanHead(nn.Module):
    r"""Scores :math:`16 \cos(f, \mu_c)` of features f, with one mean per class; −32 for a class without samples."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, features))

    means: Tensor

    def set_means(self, stored: StoredFeatures) -> None:
        """Compute the mean of the normalised features of every class."""
        features, means = normalize(stored.features.to(self.means.dtype), dim=1), torch.zeros_like(self.means)
        means.index_add_(0, stored.labels.to(means.device), features)
        self.means.copy_(normalize(means, dim=1))

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores, of shape (batch, classes)."""
        missing = (self.means == 0.0).all(dim=1)
        cosines = linear(normalize(features, dim=1), self.means.to(features.dtype))
        return SHARPNESS * torch.where(missing, -2.0, cosines)


@PREDICTORS.register("class-means")
class ClassMeans(ClassPredictor):
    r"""The nearest mean of the normalised features of a class's samples in memory, as in iCaRL.

    .. math:: \arg\max_c \cos(f(x), \mu_c)

    Rebuffi et al., *iCaRL: Incremental Classifier and Representation Learning*, CVPR 2017, algorithm 1. Features of
    unit norm are nearest to the mean of unit norm with which they have the largest cosine.
    """

    keeps_heads: ClassVar[bool] = True

    def new_head(self, head: nn.Module, features: int, classes: int) -> nn.Module:
        """Return a head without means."""
        return ClassMeanHead(features, classes)

    def fit(self, heads: Mapping[str, nn.Module], stored: Mapping[str, StoredFeatures], joint: bool) -> None:
        """Compute the means."""
        for name, samples in stored.items():
            head = heads[name]
            assert isinstance(head, ClassMeanHead)
            head.set_means(samples)
