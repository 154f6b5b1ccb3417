"""A-GEM, averaged gradient episodic memory."""

from spcl.aggregation import agem_weights
from spcl.methods.base import Gradients, Method, Weights


class AGEM(Method):
    r"""Averaged gradient episodic memory: the current gradient, projected where it conflicts with memory's.

    .. math:: u = g - \min\!\left(\frac{g \cdot g_m}{g_m \cdot g_m},\, 0\right) g_m

    Chaudhry et al., *Efficient Lifelong Learning with A-GEM*, ICLR 2019, eq. 11
    (:func:`spcl.aggregation.agem_weights`).

    >>> AGEM()
    AGEM()
    """

    name = "a-gem"
    family = "SCL"
    order = 1
    summary = "the current tasks' gradient, projected where it conflicts with the memory's"
    reference = "Chaudhry et al., Efficient Lifelong Learning with A-GEM, ICLR 2019"
    reduction = "mean"

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the weights of the projection."""
        return Weights(agem_weights(gradients.known_gramian()))
