"""Projecting conflicting gradients."""

from typing import cast

from torchjd.aggregation import PCGradWeighting
from torchjd.linalg import PSDMatrix

from spcl.methods.base import Gradients, Method, Weights

__all__ = ["PCGrad"]


class PCGrad(Method):
    r"""Gradient surgery: each gradient loses its part against every other that it conflicts with, then all are added.

    .. math:: u = \sum_i g_i^{PC}, \qquad g_i^{PC} \leftarrow g_i^{PC}
        - \frac{\min(g_i^{PC}\cdot g_j,\, 0)}{\|g_j\|^2} g_j \quad\text{for the } j \ne i \text{ in random order}

    Yu et al., *Gradient Surgery for Multi-Task Learning*, NeurIPS 2020, Algorithm 1, as TorchJD has it in T×T. The
    order is drawn from PyTorch's global generator, whose state checkpoints hold.

    >>> PCGrad()
    PCGrad()
    """

    name = "pcgrad"
    family = "MTL"
    order = 4
    summary = "takes out of each gradient what conflicts with the others, then adds them"
    reference = "Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020"

    def weigh(self, gradients: Gradients) -> Weights:
        """The weights of the sum of the projected gradients."""
        return Weights(PCGradWeighting()(cast(PSDMatrix, gradients.known_gramian())))
