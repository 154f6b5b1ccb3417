"""Heads that are fine-tuned on memory, every class counting alike."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.errors import SpclError
from spcl.learner.predictors.base import PREDICTORS, ClassPredictor, StoredFeatures

__all__ = ["BalancedHeads"]


@PREDICTORS.register("balanced-heads")
@dataclass(frozen=True)
class BalancedHeads(ClassPredictor):
    r"""Copies of the heads, fine-tuned on all of memory by ``steps`` of Adam while the backbone stays.

    .. math:: \min \tfrac1C \sum_c \mathbb E_{x \in c}[-\log p_c(x)]

    Every class counts alike, whatever the number of its samples. Class-incrementally, p is the softmax over the classes
    of all tasks that have samples in memory, else over those of the sample's task.
    """

    steps: int = 50
    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        if self.steps < 1 or self.learning_rate <= 0.0:
            raise SpclError(f"{self} cannot be used; give at least one step and a positive learning rate")

    def new_head(self, head: nn.Module, features: int, classes: int) -> nn.Module:
        """Return a copy of the trained head."""
        return copy.deepcopy(head)

    def fit(self, heads: Mapping[str, nn.Module], stored: Mapping[str, StoredFeatures], joint: bool) -> None:
        """Fine-tune the heads of the tasks that have stored samples."""
        groups = [list(stored)] if joint else [[name] for name in stored]
        for names in groups:
            if names:
                self._fine_tune([heads[name] for name in names], [stored[name] for name in names])

    def _fine_tune(self, heads: Sequence[nn.Module], stored: Sequence[StoredFeatures]) -> None:
        features = torch.cat([each.features for each in stored])
        with torch.no_grad():
            sizes = [head(features[:1]).shape[1] for head in heads]
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        pairs = zip(stored, offsets, strict=True)
        targets = torch.cat([each.labels + offset for each, offset in pairs]).to(features.device)
        weights = _balanced_weights(targets)
        parameters = [parameter.requires_grad_() for head in heads for parameter in head.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        for _ in range(self.steps):
            with torch.enable_grad():
                losses = cross_entropy(torch.cat([head(features) for head in heads], dim=1), targets, reduction="none")
                (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


def _balanced_weights(targets: Tensor) -> Tensor:
    """Return the weight of every sample, with the same sum for every class that there is, and 1 in all."""
    counts = torch.bincount(targets)
    return 1.0 / ((counts > 0).sum() * counts[targets])
