"""MGDA, the multiple-gradient descent algorithm."""

from spcl.aggregation import min_norm_weights
from spcl.methods.base import Gradients, Method, Weights


class MGDA(Method):
    r"""Multiple-gradient descent algorithm: the shortest convex combination of all gradients.

    .. math:: u = \sum_i w_i g_i, \qquad w = \arg\min_{w \ge 0,\ \sum_i w_i = 1} w^\top C w

    The update is a descent direction of every task, or zero where none exists; a task with a small gradient dominates
    it. The weights are exact (:func:`spcl.aggregation.min_norm_weights`), not a Frank–Wolfe approximation as in the
    publication.

    Sener and Koltun, *Multi-Task Learning as Multi-Objective Optimization*, NeurIPS 2018, eq. 3, after Désidéri, 2012.

    >>> MGDA()
    MGDA()
    """

    name = "mgda"
    family = "MTL"
    order = 1
    summary = "the shortest convex combination of all gradients, which descends on every task"
    reference = "Sener and Koltun, Multi-Task Learning as Multi-Objective Optimization, NeurIPS 2018"

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the weights of the shortest convex combination."""
        return Weights(min_norm_weights(gradients.known_gramian()))
