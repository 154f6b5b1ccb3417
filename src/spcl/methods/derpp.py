"""DER++, dark experience replay with labels."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from spcl.methods.base import Gradients, Method, MethodSettings, Output, Weights

__all__ = ["DERPP"]


class DERPPSettings(MethodSettings):
    """Settings of :class:`DERPP`; the defaults are the publication's for CIFAR-10 with 200 stored samples."""

    logit_weight: float = Field(0.1, ge=0.0, description="α of the formula, weight of the stored logits")
    label_weight: float = Field(0.5, ge=0.0, description="β, weight of the stored labels")


class DERPP(Method):
    r"""Dark experience replay++: memory is trained towards the logits it was stored with, and towards its labels.

    .. math:: u = \nabla \left( \ell + \alpha\, \mathbb E\left[\tfrac1C \|h(x') - z'\|^2\right]
        + \beta\, \mathbb E\left[\ell(h(x''), y'')\right] \right)

    with two independent batches of memory and the logits :math:`z'` stored with the first. C is the number of classes
    known when a sample was stored; later classes do not count for it. Samples that were stored without logits
    contribute to the second term only.

    Buzzega et al., *Dark Experience for General Continual Learning: a Strong, Simple Baseline*, NeurIPS 2020.

    >>> DERPP(label_weight=1.0)
    DERPP(label_weight=1.0)
    """

    name = "der++"
    family = "SCL"
    order = 6
    summary = "replays memory towards the logits it was stored with, and towards its labels"
    reference = "Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020"
    reduction = "mean"
    uses_gramian = False
    draws = 2
    stores_logits = True
    Settings = DERPPSettings
    settings: DERPPSettings

    def memory_loss(self, outputs: Sequence[Output], draw: int) -> Tensor:
        """Return the squared distance to the stored logits (first draw) or the tasks' losses (second draw)."""
        if draw == 1:
            return self.settings.label_weight * super().memory_loss(outputs, draw)
        return self.settings.logit_weight * torch.cat([_squared_distances(output) for output in outputs]).mean()

    def weigh(self, gradients: Gradients) -> Weights:
        """Return ones: the terms carry their weights already."""
        return Weights(torch.ones(len(gradients.names)))


def _squared_distances(output: Output) -> Tensor:
    """Return the mean squared distance of every sample to its stored logits; 0 where it has none."""
    value, stored = output.value, output.value.detach() if output.stored is None else output.stored
    if output.task.classes is not None:
        value = value[:, : stored.shape[1]]  # classes of later tasks were added to the right
    value, stored = value.reshape(len(value), -1), stored.reshape(len(value), -1)
    known = ~stored.isnan()
    squares = (value - torch.where(known, stored, value.detach())).square()
    return squares.sum(dim=1) / known.sum(dim=1).clamp(min=1)
