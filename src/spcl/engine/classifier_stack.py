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
    """Cross-entropies of many tasks, which have linear heads of one shape and batches of one size, and their gradients.

    The gradient of a cross-entropy is the softmax of the logits, less 1 at the label. Computed so, without autograd, it
    takes a fraction of the calls.

    Args:
        samples: the tasks' batches, for which :meth:`supports` holds.
        device: of the model.

    Attributes:
        logits: of shape (tasks, batch, classes), once there was a forward pass.
        gradients: of the weights and biases of all heads that are trained, once there was a backward pass.
    """

    logits: Tensor
    gradients: list[Tensor]

    def __init__(self, samples: Sequence[Samples], device: torch.device) -> None:
        heads = [cast(nn.Linear, group.task.head)._parameters for group in samples]
        self._parameters = [[cast(nn.Parameter, head[name]) for head in heads] for name in ("weight", "bias")]
        self._labels = torch.cat([group.y for group in samples]).to(device, non_blocking=True).unsqueeze(1)

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

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """Return the mean cross-entropy of every task."""
        self._weight, bias = (torch.stack([*parameters]) for parameters in self._parameters)
        self._features = features.detach().view(len(self), -1, features.shape[1])
        logits = torch.baddbmm(bias.unsqueeze(1), self._features, self._weight.transpose(1, 2))
        self.logits = logits.to(bias.dtype)  # losses are computed in full precision
        self._log_softmax = torch.log_softmax(self.logits, dim=2).flatten(0, 1)
        self._at_labels = self._log_softmax.gather(1, self._labels)
        return self._at_labels.view(len(self), -1).mean(dim=1).neg_()

    @torch.no_grad()
    def backward(self, shares: Sequence[float]) -> Tensor:
        """Compute the gradients of the losses, each times its share; return that of the features."""
        factors = [share / self._features.shape[1] for share in shares]
        softmax = self._log_softmax.exp_().scatter_(1, self._labels, self._at_labels.expm1())
        gradient = softmax.view_as(self.logits)
        gradient *= factors[0] if len(set(factors)) == 1 else gradient.new_tensor(factors).view(-1, 1, 1)
        lower = gradient.to(self._features.dtype)
        self.gradients = []
        if self._parameters[0][0].requires_grad:
            self.gradients.append(torch.bmm(lower.transpose(1, 2), self._features).to(gradient.dtype))
        if self._parameters[1][0].requires_grad:
            self.gradients.append(gradient.sum(dim=1))
        return torch.bmm(lower, self._weight.to(lower.dtype)).flatten(0, 1)

    def assign_grads(self) -> None:
        """Add the gradients to those of the heads' parameters."""
        trained = [parameters for parameters in self._parameters if parameters[0].requires_grad]
        for parameters, stacked in zip(trained, self.gradients, strict=True):
            for parameter, gradient in zip(parameters, stacked.unbind(), strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


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
