"""Replay towards stored logits."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from spcl.methods.replay.base import ReplayLoss, ReplayOptions, TaskLoss
from spcl.methods.tasks import Output

__all__ = ["LogitOptions", "StoredLogits", "squared_distances"]


class LogitOptions(ReplayOptions):
    """Options of :class:`StoredLogits`."""

    logit_weight: float = Field(0.5, ge=0.0, description="weight of the distance to the stored logits")


class StoredLogits(ReplayLoss):
    r"""Samples are trained towards their labels, and towards the logits that they were stored with:
    :math:`\ell_m = \mathbb E\left[\ell(h(x), y) + \lambda \tfrac1C \|h(x) - z\|^2\right]`, with the weight
    :math:`\lambda` of the logits :math:`z`.

    C is the number of classes known when a sample was stored; later classes do not count for it. Samples that were
    stored without logits are trained towards their labels alone. The memory ``balanced`` stores the logits when a task
    ends, those of the averaged weights where there are any.
    """

    stores_logits: ClassVar[bool] = True
    is_plain: ClassVar[bool] = False
    Options: ClassVar[type[ReplayOptions]] = LogitOptions
    settings: LogitOptions

    def loss(self, outputs: Sequence[Output], draw: int, task_loss: TaskLoss) -> Tensor:
        """Return the mean of the tasks' losses and of the weighted squared distances, on the same samples."""
        distance = torch.cat([squared_distances(output) for output in outputs]).mean()
        return super().loss(outputs, draw, task_loss) + self.settings.logit_weight * distance


def squared_distances(output: Output) -> Tensor:
    """Return the mean squared distance of every sample to its stored logits; 0 where it has none."""
    value, stored = output.value, output.value.detach() if output.stored is None else output.stored
    if output.task.classes is not None:
        value = value[:, : stored.shape[1]]  # classes of later tasks were added to the right
    value, stored = value.reshape(len(value), -1), stored.reshape(len(value), -1)
    known = ~stored.isnan()
    squares = (value - torch.where(known, stored, value.detach())).square()
    return squares.sum(dim=1) / known.sum(dim=1).clamp(min=1)
