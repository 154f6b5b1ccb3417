"""Multiple-gradient descent."""

from spcl.aggregation import min_norm_weights
from spcl.methods.base import Gradients, Method, Weights

__all__ = ["MGDA"]


class MGDA(Method):
    r"""The multiple-gradient descent algorithm: the shortest convex combination of all gradients.

    .. math:: u = \arg\min \big\{ \|\textstyle\sum_i w_i g_i\| : w \ge 0, \textstyle\sum_i w_i = 1 \big\}

    It is a descent direction of every task, or zero where none exists. Sener and Koltun, *Multi-Task Learning as
    Multi-Objective Optimization*, NeurIPS 2018, eq. 3, after Désidéri, 2012. Their Frank–Wolfe iteration approximates
    the weights; here they are exact (:func:`spcl.aggregation.min_norm_weights`), so there is nothing to set.

    >>> MGDA()
    MGDA()
    """

    name = "mgda"
    family = "MTL"
    order = 1
    summary = "the shortest convex combination of all gradients, which descends on every task"
    reference = "Sener and Koltun, Multi-Task Learning as Multi-Objective Optimization, NeurIPS 2018"

    def weigh(self, gradients: Gradients) -> Weights:
        """The weights of the shortest convex combination."""
        return Weights(min_norm_weights(gradients.known_gramian()))
