"""Gradient-based memory editing."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from spcl.errors import SpclError
from spcl.memory import Memory, ReplayBatch
from spcl.methods.base import LookAhead, MethodSettings, Task
from spcl.methods.er import ER

__all__ = ["GMED"]


class GMEDSettings(MethodSettings):
    """Settings of :class:`GMED`; the defaults are those of the code its authors published."""

    stride: float = Field(
        0.1, ge=0.0, description="α of the publication, length of an edit, for inputs of standard deviation 1"
    )
    regularisation: float = Field(0.01, ge=0.0, description="β, how strongly edits avoid a high loss as such")
    decay: float = Field(1.0, gt=0.0, le=1.0, description="γ, by which every further edit of a sample is shorter")
    rate: float = Field(0.03, gt=0.0, description="η, learning rate of the look-ahead")


class GMED(ER):
    r"""Gradient-based memory editing: rehearsal samples are moved to where the model is about to forget them.

    .. math:: x \leftarrow x + \gamma^k \alpha s^2\, \nabla_x \big[\ell(x; \theta') - \ell(x; \theta)
        - \beta\, \ell(x; \theta)\big], \qquad \theta' = \theta - \eta g

    for a sample that was edited k times before; edited samples are replayed as in :class:`ER` and written back to
    memory. Jin et al., *Gradient-based Editing of Memory Examples for Online Task-free Continual Learning*, NeurIPS
    2021, eq. 2 and 3.

    The look-ahead moves the shared parameters down the current tasks' mean gradient g; the losses are each sample's
    own. With :math:`s^2`, the variance of the drawn inputs, α is meant for inputs of standard deviation 1, whatever
    units they are stored in: the bytes of an image, from 0 to 255, are edited as their normalised values would be.
    Memory must hold inputs in floating point, e.g. ``BalancedCoreset(3000, dtype=torch.float32)``.

    >>> GMED(decay=0.99)
    GMED(decay=0.99)
    """

    name = "gmed"
    family = "SCL"
    order = 2
    summary = "ER, with memory's inputs edited towards what is about to be forgotten"
    reference = "Jin et al., Gradient-based Editing of Memory Examples, NeurIPS 2021"
    edits_memory = True
    Settings = GMEDSettings
    settings: GMEDSettings

    def check_task(self, task: Task, x: Tensor, memory: Memory | None) -> None:
        """Refuse a memory that cannot hold edited inputs."""
        kept = x.dtype if memory is None or memory.dtype is None else memory.dtype
        if memory is not None and not kept.is_floating_point:
            raise SpclError(
                f"method 'gmed' edits inputs, but memory keeps those of task {task.name!r} as {kept}; "
                f"build it with dtype=torch.float32"
            )

    def edit(self, rehearsals: Sequence[ReplayBatch], model: LookAhead) -> list[Tensor]:
        """The edited inputs."""
        inputs = [part.x.detach().requires_grad_() for part in rehearsals]
        now = torch.autograd.grad(model.loss(inputs), inputs)
        with model.ahead(self.settings.rate):
            ahead = torch.autograd.grad(model.loss(inputs), inputs)
        variance = torch.cat([x.detach().flatten() for x in inputs]).var(correction=0)
        return [
            x.detach() + variance * self._strides(part) * (after - (1.0 + self.settings.regularisation) * before)
            for part, x, before, after in zip(rehearsals, inputs, now, ahead, strict=True)
        ]

    def _strides(self, part: ReplayBatch) -> Tensor:
        strides = self.settings.stride * self.settings.decay ** part.edits.to(part.x)
        return strides.view(-1, *[1] * (part.x.ndim - 1))
