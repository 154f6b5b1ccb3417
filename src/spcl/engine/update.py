"""The update of the weights, once the gradients are in the parameters' ``.grad``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from spcl.engine.averaging import WeightAverage

__all__ = ["Update"]

SAME_BY_FOREACH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimisers that give the same numbers, to the last bit, for one tensor after the other and for many at once."""

MANY, SMALL = 16, 1 << 14
"""From so many tensors on, of at most so many numbers, calls take longer than arithmetic on a CPU."""


@dataclass(frozen=True)
class Update:
    """Clipping of the gradients, one step of the optimiser, and the average of the weights after it.

    Attributes:
        optimizer: the optimiser of all parameters.
        factor: of every group's initial learning rate in this step; None leaves the learning rates as they are.
        clip_norm: the largest norm of all gradients together, or None.
        average: of the weights, or None.
    """

    optimizer: Optimizer
    factor: float | None = None
    clip_norm: float | None = None
    average: WeightAverage | None = None

    def set_learning_rates(self) -> None:
        """Set the groups' learning rates.

        Those of ``capturable`` groups on a GPU are tensors that are filled in place, so that a captured optimiser reads
        them and need not be captured again.
        """
        if self.factor is None:
            return
        groups = self.optimizer.param_groups
        device = next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))
        for group in groups:
            is_new = "initial_lr" not in group  # also the name that PyTorch's schedulers use
            if is_new:
                group["initial_lr"] = float(group["lr"])
            rate, present = group["initial_lr"] * self.factor, group["lr"]
            if not (group.get("capturable") and device.type == "cuda"):
                group["lr"] = rate
            elif not is_new and isinstance(present, Tensor) and present.device == device:
                present.fill_(rate)
            else:
                group["lr"] = torch.full((), rate, device=device)

    def apply(self) -> None:
        """Update the weights at the present learning rates, without synchronising with a GPU."""
        if self.clip_norm is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            clip_grad_norm_(parameters, self.clip_norm)
        with _small_tensors_at_once(self.optimizer):
            self.optimizer.step()
        if self.average is not None:
            self.average.update()


@contextmanager
def _small_tensors_at_once(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimiser take each operation on all tensors of a group in one call, as PyTorch does on a GPU only.

    For the heads of 64 tasks that halves the time. Large tensors are faster one by one: they stay in the cache.
    """
    groups = [group for group in optimizer.param_groups if _has_small_tensors(group)]
    chosen = groups if type(optimizer) in SAME_BY_FOREACH else []
    for group in chosen:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["foreach"] = None


def _has_small_tensors(group: Mapping[str, Any]) -> bool:
    """Return whether a group has many small tensors on a CPU, and leaves it to PyTorch how they are updated."""
    parameters, is_fixed = group["params"], group.get("foreach") is not None or group.get("fused")
    if is_fixed or group.get("differentiable") or isinstance(group["lr"], Tensor) or len(parameters) < MANY:
        return False
    return parameters[0].device.type == "cpu" and max(map(Tensor.numel, parameters)) <= SMALL
