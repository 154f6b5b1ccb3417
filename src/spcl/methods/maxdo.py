"""Maximum discrepancy optimisation."""

from typing import cast

from torchjd.linalg import PSDMatrix

from spcl.aggregation import MaxDOWeighting
from spcl.methods.base import Gradients, Method, Weights

__all__ = ["MaxDO"]


class MaxDO(Method):
    r"""Maximum discrepancy optimisation: near to every gradient, as seen from all the others.

    .. math:: w = \frac{1}{T+1} \Big( w^{(0)} + \sum_i w^{(i)} \Big), \qquad
        w^{(i)} = \arg\min_{w \in \Delta,\, w_i = 0} \mathrm{AGD}\Big(\sum_j w_j g_j \to g_i\Big)

    with the weights :math:`w^{(0)}` of the shortest convex combination and the asymmetric gradient distance
    :math:`\mathrm{AGD}(x \to y) = \|x-y\| / (\|x-y\| + \|y\|)`. Lyu et al., *Measuring Asymmetric Gradient Discrepancy
    in Parallel Continual Learning*, ICCV 2023 (:class:`spcl.aggregation.MaxDOWeighting`).

    >>> MaxDO()
    MaxDO()
    """

    name = "maxdo"
    family = "PCL"
    order = 1
    summary = "combines gradients so that none is far from what the others would do"
    reference = "Lyu et al., Measuring Asymmetric Gradient Discrepancy in Parallel Continual Learning, ICCV 2023"

    def weigh(self, gradients: Gradients) -> Weights:
        """The weights, in T×T."""
        return Weights(MaxDOWeighting()(cast(PSDMatrix, gradients.known_gramian())))
