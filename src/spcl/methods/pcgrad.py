"""PCGrad, projection of conflicting gradients."""

from typing import TYPE_CHECKING, cast

from spcl.methods.base import Gradients, Method, Weights

if TYPE_CHECKING:
    from torchjd.linalg import PSDMatrix


class PCGrad(Method):
    r"""Gradient surgery: from each gradient the parts that conflict with the others are removed, then all are added.

    .. math:: u = \sum_i g_i^{PC}, \qquad g_i^{PC} \leftarrow g_i^{PC}
        - \frac{\min(g_i^{PC}\cdot g_j,\, 0)}{\|g_j\|^2}\, g_j \quad\text{for the } j \ne i \text{ in random order}

    With two tasks the update conflicts with neither; with more it may. The order is drawn from PyTorch's global
    generator. The published SPCL code projects each gradient against one random partner only.

    Yu et al., *Gradient Surgery for Multi-Task Learning*, NeurIPS 2020, Algorithm 1, as implemented in T×T by TorchJD.

    >>> PCGrad()
    PCGrad()
    """

    name = "pcgrad"
    family = "MTL"
    order = 4
    summary = "removes from each gradient what conflicts with the others, then adds them"
    reference = "Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020"

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the weights of the sum of the projected gradients."""
        from torchjd.aggregation import PCGradWeighting

        return Weights(PCGradWeighting()(cast("PSDMatrix", gradients.known_gramian())))
