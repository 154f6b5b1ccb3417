"""The update of the weights, once the gradients are in the parameters' ``.grad``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from spcl.engine.averaging import WeightAverage

__all__ = ["Update"]

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimisers that can update all tensors of a group in one call."""

PLAIN = (Tensor, nn.Parameter)
"""Tensors that are not sharded."""


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
        with _fused(self.optimizer):
            self.optimizer.step()
        if self.average is not None:
            self.average.update()


@contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimiser update all tensors of a group in one call, where it can and the user leaves it the choice.

    On a CPU PyTorch makes a dozen calls for every tensor by itself; with 64 heads that takes four times as long.
    """
    groups = [group for group in optimizer.param_groups if type(optimizer) in FUSED]
    before = [group["fused"] for group in groups]
    for group in groups:
        is_chosen = group["fused"] or (group["fused"] is None and _is_free(group))
        group["fused"] = (not _starts_momentum(optimizer, group)) if is_chosen else group["fused"]
    try:
        yield
    finally:
        for group, fused in zip(groups, before, strict=True):
            group["fused"] = fused


def _is_free(group: Mapping[str, Any]) -> bool:
    """Return whether a group leaves it to PyTorch how its tensors are updated, and one call can update all of them."""
    if group["foreach"] is not None or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    return all(map(_is_plain, group["params"]))


def _is_plain(parameter: Tensor) -> bool:
    """Return whether a tensor on a CPU, and its gradient, are numbers without gaps: the call ignores strides."""
    gradient = parameter.grad
    is_dense = gradient is None or (not gradient.is_sparse and gradient.is_contiguous())
    is_number = parameter.is_cpu and parameter.is_floating_point() and parameter.is_contiguous()
    return type(parameter) in PLAIN and is_number and is_dense


def _starts_momentum(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether some tensors, but not all, have no momentum yet, which the fused SGD cannot compute."""
    if not group.get("momentum"):
        return False
    trained = (parameter for parameter in group["params"] if parameter.grad is not None)
    return len({optimizer.state[parameter].get("momentum_buffer") is None for parameter in trained}) > 1
