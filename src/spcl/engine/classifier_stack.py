"""Linear classifiers of one shape, computed together."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.engine.model import Samples

__all__ = ["ClassifierStack"]

FEWEST = 8
"""Fewer heads take no longer one by one."""


class ClassifierStack:
    """Logits and cross-entropies of many tasks, which have linear heads of one shape and batches of one size.

    Args:
        samples: the tasks' batches, for which :meth:`supports` holds.
        device: of the model.
    """

    def __init__(self, samples: Sequence[Samples], device: torch.device) -> None:
        self._heads = [group.task.head for group in samples]
        self._size = len(samples[0].y)
        self._labels = torch.cat([group.y for group in samples]).to(device, non_blocking=True)

    @staticmethod
    def supports(samples: Sequence[Samples]) -> bool:
        """Return whether these tasks are plain classifiers alike."""
        return len(samples) >= FEWEST and len({_shape(group) for group in samples}) == 1 and _shape(samples[0]) != ()

    @property
    def samples(self) -> int:
        """The number of samples of all tasks."""
        return len(self._labels)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of shape (tasks, batch, classes)."""
        weights = torch.stack([head.weight for head in self._heads])  # type: ignore[union-attr, misc]
        biases = torch.stack([head.bias for head in self._heads])  # type: ignore[union-attr, misc]
        by_task = features.view(len(self._heads), self._size, -1)
        return torch.baddbmm(biases.unsqueeze(1), by_task, weights.transpose(1, 2))

    def losses(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy of every task."""
        each = cross_entropy(logits.flatten(0, 1), self._labels, reduction="none")
        return each.view(len(self._heads), -1).mean(dim=1)


def _shape(group: Samples) -> tuple[object, ...]:
    """Return what must be alike; nothing for a task that is no plain classifier."""
    task, head = group.task, group.task.head
    if task.loss is not cross_entropy or type(head) is not nn.Linear or head.bias is None or group.y.ndim != 1:
        return ()
    return len(group.y), head.out_features, head.weight.requires_grad, head.bias.requires_grad, group.y.device
