"""DER++, dark experience replay with labels."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from spcl.methods.base import Gradients, Method, Weights
from spcl.methods.replay import REPLAY_LOSSES, LogitOptions, ReplayLoss, ReplayLossName, StoredLogits
from spcl.methods.settings import MethodSettings


class DERPPSettings(LogitOptions, MethodSettings):
    """Settings of :class:`DERPP`; the defaults are the publication's for CIFAR-10 with 200 stored samples."""

    replay_loss: ReplayLossName = Field("logits", description="loss on replayed samples")
    logit_weight: float = Field(0.1, ge=0.0, description="α of the formula, weight of the stored logits")
    label_weight: float = Field(0.5, ge=0.0, description="β, weight of the stored labels")


class _TwoDraws(StoredLogits):
    """Stored logits and labels, each of a batch of its own."""

    draws: ClassVar[int] = 2
    settings: DERPPSettings

    def coefficients(self, draw: int) -> tuple[float, float]:
        """Return the weight of the stored logits (first draw), or the weight of the labels (second draw)."""
        return (0.0, self.settings.logit_weight) if draw == 0 else (self.settings.label_weight, 0.0)


class DERPP(Method):
    r"""Dark experience replay++: memory is trained towards the logits it was stored with, and towards its labels.

    .. math:: u = \nabla \left( \ell + \alpha\, \mathbb E\left[\tfrac1C \|h(x') - z'\|^2\right]
        + \beta\, \mathbb E\left[\ell(h(x''), y'')\right] \right)

    with two independent batches of memory and the logits :math:`z'` stored with the first. C is the number of classes
    known when a sample was stored; later classes do not count for it. Samples that were stored without logits
    contribute to the second term only. With other methods, ``replay_loss="logits"`` trains the same samples towards
    both.

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
    replay_losses: ClassVar[Mapping[str, type[ReplayLoss]]] = {**REPLAY_LOSSES, "logits": _TwoDraws}
    Settings = DERPPSettings
    settings: DERPPSettings

    def weigh(self, gradients: Gradients) -> Weights:
        """Return ones: the terms carry their weights already."""
        return Weights(torch.ones(len(gradients.names)))
