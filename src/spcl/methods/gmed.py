"""GMED, gradient-based memory editing."""

from collections.abc import Hashable, Sequence

import torch
from pydantic import Field
from torch import Tensor

from spcl.batches import Inputs, describe, sample_kind
from spcl.errors import SpclError, TaskError
from spcl.memory import Memory, ReplayBatch
from spcl.methods.base import LookAhead, MethodSettings, Task
from spcl.methods.er import ER

__all__ = ["GMED"]


class GMEDSettings(MethodSettings):
    """Settings of :class:`GMED`; the defaults are those of the code its authors published."""

    stride: float = Field(0.1, ge=0.0, description="α, length of an edit, for inputs of standard deviation 1")
    regularisation: float = Field(0.01, ge=0.0, description="β, weight against edits that raise the present loss")
    decay: float = Field(1.0, gt=0.0, le=1.0, description="γ, factor of the stride for every earlier edit")
    rate: float = Field(0.03, gt=0.0, description="η, learning rate of the look-ahead")


class GMED(ER):
    r"""Gradient-based memory editing: ER whose replayed samples are first moved to where their loss is about to rise.

    .. math:: x \leftarrow x + \gamma^k \alpha s^2\, \nabla_x \left[\ell(x; \theta') - \ell(x; \theta)
        - \beta\, \ell(x; \theta)\right], \qquad \theta' = \theta - \eta g

    for a sample that was edited k times before. The look-ahead :math:`\theta'` is a step of the shared parameters down
    the current tasks' mean gradient; its rate is a setting, since the optimiser's own step is not known in advance. The
    variance :math:`s^2` of the drawn inputs, for every shape and type by itself, makes the stride α independent of
    their units. Edits are written back to memory, so it must keep inputs in floating point, e.g.
    ``BalancedCoreset(3000, dtype=torch.float32)``; inputs that are dicts, tuples or integers other than bytes are an
    error.

    Jin et al., *Gradient-based Editing of Memory Examples for Online Task-free Continual Learning*, NeurIPS 2021, eq. 2
    and 3.

    >>> GMED(decay=0.99)
    GMED(decay=0.99)
    """

    name = "gmed"
    family = "SCL"
    order = 2
    summary = "ER on samples that are edited towards a loss that is about to rise"
    reference = "Jin et al., Gradient-based Editing of Memory Examples, NeurIPS 2021"
    edits_memory = True
    Settings = GMEDSettings
    settings: GMEDSettings

    def check_task(self, task: Task, x: Inputs, memory: Memory | None) -> None:
        """Raise an error if memory cannot hold edited inputs."""
        if memory is None:
            return
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.dtype == torch.uint8):
            raise TaskError(
                f"method 'gmed' edits inputs, but those of task {task.name!r} are {describe(x, 1)} and not one "
                f"floating-point tensor; choose another method, e.g. 'er'"
            )
        kept = x.dtype if memory.dtype is None else memory.dtype
        if not kept.is_floating_point:
            raise SpclError(
                f"method 'gmed' edits inputs, but memory keeps those of task {task.name!r} as {kept}; "
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
