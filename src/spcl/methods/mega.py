"""MEGA, mixed stochastic gradient."""

import torch
from pydantic import Field

from spcl.methods.base import Gradients, Method, Weights
from spcl.methods.settings import MethodSettings


class MEGASettings(MethodSettings):
    """Settings of :class:`MEGA`; the default is the one in its authors' code."""

    epsilon: float = Field(1e-10, ge=0.0, description="ε, current loss at and below which only memory is trained")


class MEGA(Method):
    r"""Mixed stochastic gradient (MEGA-I): memory's gradient is weighted by the ratio of its loss to the current one.

    .. math:: u = \begin{cases} g + \dfrac{\ell_m}{\ell}\, g_m & \ell > \epsilon \\ g_m & \text{else} \end{cases}

    with the mean loss :math:`\ell` of the current tasks and :math:`\ell_m` of memory. The published SPCL code swaps the
    two weights, has ε = 0.1 and takes the loss of the first task alone.

    Guo et al., *Improved Schemes for Episodic Memory-based Lifelong Learning*, NeurIPS 2020.

    >>> MEGA(epsilon=0.1)
    MEGA(epsilon=0.1)
    """

    name = "mega"
    family = "SCL"
    order = 4
    summary = "adds memory's gradient, weighted by the ratio of the two losses"
    reference = "Guo et al., Improved Schemes for Episodic Memory-based Lifelong Learning, NeurIPS 2020"
    reduction = "mean"
    uses_gramian = False
    Settings = MEGASettings
    settings: MEGASettings

    def weigh(self, gradients: Gradients) -> Weights:
        """Return 1 and ℓ_m/ℓ, or 0 and 1 if the current loss is at most ε."""
        if len(gradients.names) == 1:
            return Weights(torch.ones(1))
        current, memory = gradients.losses.tolist()
        weights = [1.0, memory / current] if current > self.settings.epsilon else [0.0, 1.0]
        return Weights(torch.tensor(weights, dtype=torch.float64))
