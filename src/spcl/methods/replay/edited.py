"""Replay of edited samples."""

from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from spcl.batches import Inputs, describe, sample_kind
from spcl.errors import SpclError, TaskError
from spcl.memory import Memory, ReplayBatch
from spcl.methods.replay.base import LookAhead, ReplayLoss, ReplayOptions
from spcl.methods.tasks import Task

__all__ = ["EditOptions", "EditedSamples"]


class EditOptions(ReplayOptions):
    """Options of :class:`EditedSamples`; the defaults are those of the code that GMED's authors published."""

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
                f"{owner} edits inputs, but those of task {task.name!r} are {describe(x, 1)} and not one "
                f"floating-point tensor; choose another method, e.g. 'er', or replay_loss='labels'"
            )
        kept = x.dtype if memory.dtype is None else memory.dtype
        if not kept.is_floating_point:
            raise SpclError(
                f"{owner} edits inputs, but memory keeps those of task {task.name!r} as {kept}; "
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
    """Return for each of the inputs the variance of all that have its shape and type."""
    alike: dict[Hashable, list[Tensor]] = {}
    for x in inputs:
        alike.setdefault(sample_kind(x), []).append(x.detach().flatten())
    variances = {kind: torch.cat(parts).var(correction=0) for kind, parts in alike.items()}
    return [variances[sample_kind(x)] for x in inputs]
