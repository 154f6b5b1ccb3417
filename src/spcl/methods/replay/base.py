"""Base class of losses on replayed samples."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from spcl.batches import Inputs
from spcl.memory import Memory, ReplayBatch
from spcl.methods.replay.distances import stored_distances
from spcl.methods.tasks import Output, Task

__all__ = ["LookAhead", "ReplayLoss", "ReplayOptions", "TaskLoss"]

TaskLoss = Callable[[Output], Tensor]
"""The method's loss of samples of one task."""


class LookAhead(Protocol):
    """Access to the model for :meth:`ReplayLoss.edit`."""

    def loss(self, inputs: Sequence[Inputs]) -> Tensor:
        """Return the summed loss of the samples in evaluation mode, with these inputs instead of the stored ones."""
        ...

    def ahead(self, rate: float) -> AbstractContextManager[None]:
        """Move the shared parameters, within the block, by a step along the current tasks' mean gradient."""
        ...


class ReplayOptions(BaseModel):
    """Options of a loss on replayed samples, which are settings of a method that uses it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ReplayLoss:
    """The loss on the samples that a step draws from memory, and what else becomes of them.

    A subclass says how many batches are drawn (``draws``), whether memory must store the logits of its samples
    (``stores_logits``), whether :meth:`edit` changes them (``edits_memory``), and what the loss consists of
    (:meth:`coefficients`), which CUDA graphs compute as well. A loss of another kind overrides :meth:`loss` and runs
    eagerly.

    Args:
        settings: of the method, among them the ``Options``.
    """

    draws: ClassVar[int] = 1
    stores_logits: ClassVar[bool] = False
    edits_memory: ClassVar[bool] = False
    Options: ClassVar[type[ReplayOptions]] = ReplayOptions

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def check_task(self, owner: str, task: Task, x: Inputs, memory: Memory | None) -> None:
        """Refuse a task whose samples cannot be replayed so; the error begins with the owner."""

    def coefficients(self, draw: int) -> tuple[float, float]:
        """Return the coefficients of the tasks' losses and of the squared distances to stored logits in a loss."""
        return 1.0, 0.0

    def loss(self, outputs: Sequence[Output], draw: int, task_loss: TaskLoss) -> Tensor:
        r"""Return the loss on a batch, :math:`\mathbb E\left[a\, \ell(h(x), y) + b \tfrac1C \|h(x) - z\|^2\right]`.

        Args:
            outputs: of the model for the samples of every task.
            draw: which of the step's batches it is; it has the :meth:`coefficients` a and b.
            task_loss: the loss of samples of one task.
        """
        of_labels, of_logits = self.coefficients(draw)
        if not of_logits:
            return _times(of_labels, _mean_loss(outputs, task_loss))
        distance = of_logits * torch.cat([stored_distances(output) for output in outputs]).mean()
        return _times(of_labels, _mean_loss(outputs, task_loss)) + distance if of_labels else distance

    def edit(self, batches: Sequence[ReplayBatch], model: LookAhead) -> Sequence[Inputs]:
        """Return new inputs for replayed samples, which are written back to memory; called if ``edits_memory``."""
        raise NotImplementedError(f"{type(self).__name__} does not edit samples")


def _mean_loss(outputs: Sequence[Output], task_loss: TaskLoss) -> Tensor:
    """Return the mean of the tasks' losses over all samples."""
    total = sum(len(output.targets) for output in outputs)
    return torch.stack([task_loss(output) * (len(output.targets) / total) for output in outputs]).sum()


def _times(coefficient: float, loss: Tensor) -> Tensor:
    return loss if coefficient == 1.0 else coefficient * loss
