"""Linear classifiers of one shape, computed together."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.engine.model import Samples

__all__ = ["ClassifierStack"]

FEWEST = 8
"""Fewer heads take no longer one by one."""


class ClassifierStack:
    """Logits and cross-entropies of many tasks, which have linear heads of one shape and batches of one size.

    Autograd sees one weight and one bias, whose gradients :meth:`assign_grads` hands to the heads.

    Args:
        samples: the tasks' batches, for which :meth:`supports` holds.
        device: of the model.
    """

    def __init__(self, samples: Sequence[Samples], device: torch.device) -> None:
        heads = [cast(nn.Linear, group.task.head)._parameters for group in samples]
        self._parameters = [[cast(nn.Parameter, head[name]) for head in heads] for name in ("weight", "bias")]
        self._stacked = [_stacked(some) for some in self._parameters]
        self._labels = torch.cat([group.y for group in samples]).to(device, non_blocking=True)

    @staticmethod
    def supports(samples: Sequence[Samples]) -> bool:
        """Return whether these tasks are plain classifiers alike."""
        if len(samples) < FEWEST or (shape := _shape(samples[0])) is None:
            return False
        return all(_shape(group) == shape for group in samples)

    def __len__(self) -> int:
        return len(self._parameters[0])

    @property
    def samples(self) -> int:
        """The number of samples of all tasks."""
        return len(self._labels)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of all heads, once there was a backward pass."""
        return [stacked.grad for stacked in self._stacked if stacked.grad is not None]

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of shape (tasks, batch, classes)."""
        by_task = features.view(len(self), -1, features.shape[1])
        weight, bias = self._stacked
        return torch.baddbmm(bias.unsqueeze(1), by_task, weight.transpose(1, 2))

    def losses(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy of every task."""
        each = cross_entropy(logits.flatten(0, 1), self._labels, reduction="none")
        return each.view(len(self), -1).mean(dim=1)

    def assign_grads(self) -> None:
        """Add the gradients to those of the heads' parameters."""
        for parameters, stacked in zip(self._parameters, self._stacked, strict=True):
            if stacked.grad is not None:
                for parameter, gradient in zip(parameters, stacked.grad.unbind(), strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _stacked(parameters: list[nn.Parameter]) -> Tensor:
    with torch.no_grad():
        return torch.stack([*parameters]).requires_grad_(parameters[0].requires_grad)


def _shape(group: Samples) -> tuple[object, ...] | None:
    """Return what must be alike; None for a task that is no plain classifier."""
    task, head, y = group.task, group.task.head, group.y
    if task.loss is not cross_entropy or type(head) is not nn.Linear or y.ndim != 1:
        return None
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return None
    shape: list[object] = [y.shape, y.device]
    for name in ("weight", "bias"):
        parameter = head._parameters.get(name)
        if parameter is None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return None
        shape += [parameter.shape, parameter.requires_grad]
    return tuple(shape)
