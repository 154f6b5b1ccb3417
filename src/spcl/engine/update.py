"""The update of the weights, once the gradients are in the parameters' ``.grad``."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from spcl.engine.averaging import WeightAverage
from spcl.engine.fused_update import make_step

__all__ = ["Update"]


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
        make_step(self.optimizer)
        if self.average is not None:
            self.average.update()
