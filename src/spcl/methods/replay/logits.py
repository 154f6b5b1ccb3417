"""Replay towards stored logits."""

from typing import ClassVar

from pydantic import Field

from spcl.methods.replay.base import ReplayLoss, ReplayOptions

__all__ = ["LogitOptions", "StoredLogits"]


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
    Options: ClassVar[type[ReplayOptions]] = LogitOptions
    settings: LogitOptions

    def coefficients(self, draw: int) -> tuple[float, float]:
        """Return 1 for the labels, and the weight of the logits, on the same samples."""
        return 1.0, self.settings.logit_weight
