"""Mixed stochastic gradient."""

import torch
from pydantic import Field

from spcl.methods.base import Gradients, Method, MethodSettings, Weights

__all__ = ["MEGA"]


class MEGASettings(MethodSettings):
    """Settings of :class:`MEGA`; the default is that of the code its authors published."""

    epsilon: float = Field(1e-10, ge=0.0, description="ε, the current loss up to which only memory is trained")


class MEGA(Method):
    r"""MEGA-I: the memory's gradient, weighted by how much worse memory does than the current tasks.

    .. math:: u = \begin{cases} g + \dfrac{\ell_m}{\ell}\, g_m & \ell > \epsilon \\ g_m & \text{else} \end{cases}

    with the mean loss ℓ of the current tasks and ℓ_m of memory. Guo et al., *Improved Schemes for Episodic Memory-based
    Lifelong Learning*, NeurIPS 2020.

    >>> MEGA(epsilon=0.1)
    MEGA(epsilon=0.1)
    """

    name = "mega"
    family = "SCL"
    order = 4
    summary = "adds the memory's gradient, weighted by the ratio of the two losses"
    reference = "Guo et al., Improved Schemes for Episodic Memory-based Lifelong Learning, NeurIPS 2020"
    reduction = "mean"
    uses_gramian = False
    Settings = MEGASettings
    settings: MEGASettings

    def weigh(self, gradients: Gradients) -> Weights:
        """1 and ℓ_m/ℓ, or 0 and 1 once the current tasks are learnt."""
        if len(gradients.names) == 1:
            return Weights(torch.ones(1))
        current, memory = gradients.losses.tolist()
        weights = [1.0, memory / current] if current > self.settings.epsilon else [0.0, 1.0]
        return Weights(torch.tensor(weights, dtype=torch.float64))
