"""ER, experience replay."""

import torch

from spcl.methods.base import Gradients, Method, Weights


class ER(Method):
    r"""Experience replay: the mean of the current tasks' gradient and memory's.

    .. math:: u = \tfrac12 (g + g_m)

    Chaudhry et al., *On Tiny Episodic Memories in Continual Learning*, 2019.

    >>> ER()
    ER()
    """

    name = "er"
    family = "SCL"
    order = 3
    summary = "averages the current tasks' gradient with memory's"
    reference = "Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019"
    reduction = "mean"
    uses_gramian = False

    def weigh(self, gradients: Gradients) -> Weights:
        """Return equal weights."""
        return Weights(torch.full((len(gradients.names),), 1.0 / len(gradients.names)))
