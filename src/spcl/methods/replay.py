"""The loss on replayed samples, the first of the choices that make a method: labels, stored logits, edited samples."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from spcl.batches import Inputs, describe, sample_kind
from spcl.errors import SpclError, TaskError
from spcl.memory import Memory, ReplayBatch
from spcl.methods.base import Output, stored_distances
from spcl.tasks import Task

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
    """The loss on the samples that a step draws from memory, and how these samples are stored and edited.

    A subclass says how many batches are drawn (``draws``), whether memory must store the logits of its samples
    (``stores_logits``), whether :meth:`edit` changes them (``edits_memory``), and which terms the loss has
    (:meth:`coefficients`), which CUDA graphs compute, too. A loss of another form overrides :meth:`loss` and runs
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
        """Raise an error, which begins with the owner, if the task's samples cannot be replayed this way."""

    def coefficients(self, draw: int) -> tuple[float, float]:
        """Return the coefficients a of the tasks' losses and b of the squared distances to the stored logits."""
        return 1.0, 0.0

    def loss(self, outputs: Sequence[Output], draw: int, task_loss: TaskLoss) -> Tensor:
        r"""Return the loss on a batch, :math:`\mathbb E\left[a\, \ell(h(x), y) + b \tfrac1C \|h(x) - z\|^2\right]`.

        Args:
            outputs: of the model for the samples of every task.
            draw: the number of the replay batch in the step; :meth:`coefficients` gives its a and b.
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


class Labels(ReplayLoss):
    r"""Samples are trained towards their labels, by the losses of their tasks:
    :math:`\ell_m = \mathbb E\left[\ell(h(x), y)\right]`.
    """


class LogitOptions(ReplayOptions):
    """Options of :class:`StoredLogits`."""

    logit_weight: float = Field(0.5, ge=0.0, description="weight of the distance to the stored logits")


class StoredLogits(ReplayLoss):
    r"""Samples are trained towards their labels, and towards the logits that they were stored with:
    :math:`\ell_m = \mathbb E\left[\ell(h(x), y) + \lambda \tfrac1C \|h(x) - z\|^2\right]`, with the weight
    :math:`\lambda` of the logits :math:`z`.

    C is the number of classes known when a sample was stored; later classes do not count for it. Samples that were
    stored without logits are trained towards their labels alone. The memory ``balanced`` stores the logits when a task
    ends; they are computed with the averaged weights, if there are any.
    """

    stores_logits: ClassVar[bool] = True
    Options: ClassVar[type[ReplayOptions]] = LogitOptions
    settings: LogitOptions

    def coefficients(self, draw: int) -> tuple[float, float]:
        """Return 1 for the labels, and the weight of the logits, on the same samples."""
        return 1.0, self.settings.logit_weight


class EditOptions(ReplayOptions):
    """Options of :class:`EditedSamples`; the defaults are the ones in the code of GMED's authors."""

    stride: float = Field(0.1, ge=0.0, description="α, length of an edit, for inputs of standard deviation 1")
    regularisation: float = Field(0.01, ge=0.0, description="β, weight against edits that raise the present loss")
    decay: float = Field(1.0, gt=0.0, le=1.0, description="γ, factor of the stride for every earlier edit")
    rate: float = Field(0.03, gt=0.0, description="η, learning rate of the look-ahead")


class EditedSamples(ReplayLoss):
    r"""Samples are first moved to where their loss is about to rise, as :class:`spcl.methods.GMED` says, then trained
    towards their labels.
    """

    edits_memory: ClassVar[bool] = True
    Options: ClassVar[type[ReplayOptions]] = EditOptions
    settings: EditOptions

    def check_task(self, owner: str, task: Task, x: Inputs, memory: Memory | None) -> None:
        """Raise an error if memory cannot hold edited inputs."""
        if memory is None:
            return
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.dtype == torch.uint8):
            raise TaskError(
                f"{owner} edits inputs, but the inputs of task {task.name!r} are {describe(x, 1)} and not one "
                f"floating-point tensor; choose another method, e.g. 'er', or replay_loss='labels'"
            )
        kept = x.dtype if memory.dtype is None else memory.dtype
        if not kept.is_floating_point:
            raise SpclError(
                f"{owner} edits inputs, but memory keeps the inputs of task {task.name!r} as {kept}; "
                f"build it with dtype=torch.float32"
            )

    def edit(self, batches: Sequence[ReplayBatch], model: LookAhead) -> list[Tensor]:
        """Return the edited inputs."""
        inputs = [part.x.detach().requires_grad_() for part in batches if isinstance(part.x, Tensor)]
        now = torch.autograd.grad(model.loss(inputs), inputs)
        with model.ahead(self.settings.rate):
            ahead = torch.autograd.grad(model.loss(inputs), inputs)
        variances = _variances(inputs)
        return [
            x.detach() + variance * self._strides(part, x) * (after - (1.0 + self.settings.regularisation) * before)
            for part, x, variance, before, after in zip(batches, inputs, variances, now, ahead, strict=True)
        ]

    def _strides(self, part: ReplayBatch, x: Tensor) -> Tensor:
        strides = self.settings.stride * self.settings.decay ** part.edits.to(x)
        return strides.view(-1, *[1] * (x.ndim - 1))


def _variances(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return for each input the variance of all inputs of its shape and type."""
    alike: dict[Hashable, list[Tensor]] = {}
    for x in inputs:
        alike.setdefault(sample_kind(x), []).append(x.detach().flatten())
    variances = {kind: torch.cat(parts).var(correction=0) for kind, parts in alike.items()}
    return [variances[sample_kind(x)] for x in inputs]


ReplayLossName = Literal["labels", "logits", "edited"]

REPLAY_LOSSES: dict[str, type[ReplayLoss]] = {
    "labels": Labels,
    "logits": StoredLogits,
    "edited": EditedSamples,
}
"""The values of the setting ``replay_loss``."""
