"""MaxDO, maximum discrepancy optimisation."""

from typing import Literal

from pydantic import Field

from spcl.aggregation import maxdo_descent_weights, maxdo_weights
from spcl.methods.base import Gradients, Method, Weights
from spcl.methods.settings import MethodSettings


class MaxDOSettings(MethodSettings):
    """Settings of :class:`MaxDO`."""

    variant: Literal["exact", "descent"] = Field(
        "exact", description="solved exactly, or by five steps of gradient descent as in the published SPCL code"
    )


class MaxDO(Method):
    r"""Maximum discrepancy optimisation: a compromise that is near to every gradient as seen from the others.

    .. math:: w = \frac{1}{T+1} \left( w^{(0)} + \sum_i w^{(i)} \right), \qquad
        w^{(i)} = \arg\min_{w \in \Delta,\, w_i = 0} \mathrm{AGD}\Big(\sum_j w_j g_j \to g_i\Big),

    .. math:: \mathrm{AGD}(x \to y) = \frac{\|x - y\|}{\|x - y\| + \|y\|}

    with the weights :math:`w^{(0)}` of the shortest convex combination. For each task, :math:`w^{(i)}` are the weights
    of the convex combination of the *other* gradients that is nearest to it in the asymmetric gradient distance AGD. As
    that grows with :math:`\|x - y\|`, each is a shortest combination of the differences :math:`g_j - g_i`. The
    published SPCL code instead takes five steps of gradient descent on a normalised Euclidean distance of all gradients
    together: ``variant="descent"`` (:func:`spcl.aggregation.maxdo_descent_weights`).

    Lyu et al., *Measuring Asymmetric Gradient Discrepancy in Parallel Continual Learning*, ICCV 2023
    (:func:`spcl.aggregation.maxdo_weights`).

    >>> MaxDO()
    MaxDO()
    """

    name = "maxdo"
    family = "PCL"
    order = 1
    summary = "combines gradients so that none is far from what the others can express"
    reference = "Lyu et al., Measuring Asymmetric Gradient Discrepancy in Parallel Continual Learning, ICCV 2023"

    Settings = MaxDOSettings
    settings: MaxDOSettings

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the weights, from the Gramian."""
        gramian = gradients.known_gramian()
        if self.settings.variant == "descent":
            return Weights(maxdo_descent_weights(gramian))
        return Weights(maxdo_weights(gramian))
