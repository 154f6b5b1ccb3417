"""MaxDO, maximum discrepancy optimisation."""

from typing import cast

from torchjd.linalg import PSDMatrix

from spcl.aggregation import MaxDOWeighting
from spcl.methods.base import Gradients, Method, Weights

__all__ = ["MaxDO"]


class MaxDO(Method):
    r"""Maximum discrepancy optimisation: a compromise that is near to every gradient as seen from the others.

    .. math:: w = \frac{1}{T+1} \left( w^{(0)} + \sum_i w^{(i)} \right), \qquad
        w^{(i)} = \arg\min_{w \in \Delta,\, w_i = 0} \mathrm{AGD}\Big(\sum_j w_j g_j \to g_i\Big), \qquad
        \mathrm{AGD}(x \to y) = \frac{\|x - y\|}{\|x - y\| + \|y\|}

    with the weights :math:`w^{(0)}` of the shortest convex combination. For each task, :math:`w^{(i)}` are the weights
    of the convex combination of the *other* gradients that is nearest to it in the asymmetric gradient distance AGD. As
    that grows with :math:`\|x - y\|`, each is a shortest combination of the differences :math:`g_j - g_i`. The
    published SPCL code has no working version; this one follows the description.

    Lyu et al., *Measuring Asymmetric Gradient Discrepancy in Parallel Continual Learning*, ICCV 2023
    (:class:`spcl.aggregation.MaxDOWeighting`).

    >>> MaxDO()
    MaxDO()
    """

    name = "maxdo"
    family = "PCL"
    order = 1
    summary = "combines gradients so that none is far from what the others can express"
    reference = "Lyu et al., Measuring Asymmetric Gradient Discrepancy in Parallel Continual Learning, ICCV 2023"

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the weights, from the Gramian."""
        return Weights(MaxDOWeighting()(cast(PSDMatrix, gradients.known_gramian())))
