"""Linear classifiers of one shape, computed together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from spcl.engine.model import Samples

__all__ = ["ClassifierStack"]

MANY = 8
"""From so many tasks on, sums over the samples of a task are computed for all together, in another order."""


class ClassifierStack:
    """Cross-entropies of several tasks, with linear heads of one shape and batches of one size, and their gradients.

    They are computed without autograd, in a fraction of the calls that it makes. For fewer than ``MANY`` tasks they are
    the same to the last bit.

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
        heads: list[Any] = [group.task.head for group in samples]
        self._parameters = [[head._parameters[name] for head in heads] for name in ("weight", "bias")]
        labels = torch.cat([group.y for group in samples]).to(device, non_blocking=True)
        self._labels = labels.view(len(samples), -1)

    @staticmethod
    def supports(samples: Sequence[Samples]) -> bool:
        """Return whether these tasks are plain classifiers alike."""
        if len(samples) < 2 or (shape := _shape(samples[0])) is None:
            return False
        return all(_shape(group) == shape for group in samples)

    def __len__(self) -> int:
        return len(self._parameters[0])

    @property
    def samples(self) -> int:
        """The number of samples of all tasks."""
        return self._labels.numel()

    def forward(self, features: Tensor) -> Tensor:
        """Return the mean cross-entropy of every task."""
        with torch.no_grad():
            self._weight, bias = map(torch.stack, self._parameters)
        self._features = features.detach().view(len(self), -1, features.shape[1])
        logits = torch.baddbmm(bias.unsqueeze(1), self._features, self._weight.transpose(1, 2))
        self.logits = logits.to(bias.dtype)  # losses are computed in full precision
        self._log_softmax = torch.log_softmax(self.logits, dim=2)
        if len(self) < MANY:
            pairs = zip(self._log_softmax, self._labels, strict=True)
            return torch.stack([nll_loss(each, labels) for each, labels in pairs])
        return self._log_softmax.gather(2, self._labels.unsqueeze(2)).mean(dim=1).neg_().view(-1)

    def backward(self, shares: Sequence[float]) -> Tensor:
        """Compute the gradients of the losses, each times its share; return that of the features."""
        of_losses = torch.zeros_like(self.logits).scatter_(2, self._labels.unsqueeze(2), -1.0 / self._labels.shape[1])
        if set(shares) != {1.0}:
            of_losses *= of_losses.new_tensor(shares).view(-1, 1, 1)
        gradient = torch._log_softmax_backward_data(of_losses, self._log_softmax, 2, self.logits.dtype)
        lower = gradient.to(self._features.dtype)
        self.gradients = []
        if self._parameters[0][0].requires_grad:
            self.gradients.append(self._weight_gradients(lower).to(gradient.dtype))
        if self._parameters[1][0].requires_grad:
            self.gradients.append(gradient.sum(dim=1))
        return torch.bmm(lower, self._weight.to(lower.dtype)).flatten(0, 1)

    def _weight_gradients(self, gradient: Tensor) -> Tensor:
        if len(self) < MANY:
            return torch.stack([one.T @ other for one, other in zip(gradient, self._features, strict=True)])
        return torch.bmm(gradient.transpose(1, 2), self._features)

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
    weight, bias = head._parameters.get("weight"), head._parameters.get("bias")
    if weight is None or bias is None or _is_hooked(weight) or _is_hooked(bias):
        return None
    return y.shape, y.device, weight.shape, weight.requires_grad, bias.shape, bias.requires_grad


def _is_hooked(parameter: Any) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
