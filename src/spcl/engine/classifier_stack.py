"""Linear classifiers of one shape, computed together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from spcl.engine.head_gradients import HeadGradients
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
        kept: where the gradients of weights and biases go, kept from step to step; None makes new ones.

    Attributes:
        logits: of shape (tasks, batch, classes), once there was a forward pass.
        gradients: of the weights and biases of all heads that are trained, once there was a backward pass.
    """

    logits: Tensor
    gradients: list[Tensor]

    def __init__(
        self,
        samples: Sequence[Samples],
        device: torch.device,
        kept: tuple[HeadGradients, HeadGradients] | None = None,
    ) -> None:
        heads: list[Any] = [group.task.head for group in samples]
        self._parameters = [[head._parameters[name] for head in heads] for name in ("weight", "bias")]
        self._kept = kept or (HeadGradients(), HeadGradients())
        labels = torch.cat([group.y for group in samples]).to(device, non_blocking=True)
        self._labels = labels.view(len(samples), -1)

    @staticmethod
    def supports(samples: Sequence[Samples]) -> bool:
        """Return whether these tasks are plain classifiers alike."""
        if len(samples) < 2 or (shape := _shape(samples[0])) is None:
            return False
        return all(_shape(group) == shape for group in samples[1:])

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
            pairs = zip(self._log_softmax.unbind(), self._labels.unbind(), strict=True)
            return torch.stack([nll_loss(each, labels) for each, labels in pairs])
        return self._log_softmax.gather(2, self._labels.unsqueeze(2)).mean(dim=(1, 2)).neg_()

    def backward(self, shares: Sequence[float]) -> Tensor:
        """Compute the gradients of the losses, each times its share; return that of the features."""
        of_losses = torch.zeros_like(self.logits).scatter_(2, self._labels.unsqueeze(2), -1.0 / self._labels.shape[1])
        if set(shares) != {1.0}:
            of_losses *= of_losses.new_tensor(shares).view(-1, 1, 1)
        gradient = torch._log_softmax_backward_data(of_losses, self._log_softmax, 2, self.logits.dtype)
        lower = gradient.to(self._features.dtype)
        (weights, biases), (of_weights, of_biases) = self._parameters, self._kept
        self.gradients = []
        if weights[0].requires_grad:
            self.gradients.append(self._weight_gradients(lower, of_weights.of(weights)))
        if biases[0].requires_grad:
            self.gradients.append(torch.sum(gradient, dim=1, out=of_biases.of(biases)))
        return torch.bmm(lower, self._weight.to(lower.dtype)).flatten(0, 1)

    def _weight_gradients(self, gradient: Tensor, out: Tensor) -> Tensor:
        left, right = gradient.transpose(1, 2), self._features
        if left.dtype != out.dtype:
            return out.copy_(torch.bmm(left, right))
        if len(self) >= MANY:
            return torch.bmm(left, right, out=out)
        for one, other, product in zip(left.unbind(), right.unbind(), out.unbind(), strict=True):
            torch.mm(one, other, out=product)
        return out

    def assign_grads(self) -> None:
        """Add the gradients to those of the heads' parameters."""
        for parameters, kept in zip(self._parameters, self._kept, strict=True):
            if parameters[0].requires_grad:
                kept.assign()


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
