"""RLW, random loss weighting."""

import torch

from spcl.methods.base import Gradients, Method, Weights


class RLW(Method):
    r"""Random loss weighting: new random weights in every step.

    .. math:: w = \mathrm{softmax}(z), \qquad z_i \sim \mathcal N(0, 1)

    The weights are drawn from PyTorch's global generator.

    Lin et al., *Reasonable Effectiveness of Random Weighting: A Litmus Test for Multi-Task Learning*, TMLR 2022,
    Algorithm 2, as implemented by TorchJD.

    >>> RLW()
    RLW()
    """

    name = "rlw"
    family = "MTL"
    order = 5
    summary = "random weights, new in every step"
    reference = "Lin et al., Reasonable Effectiveness of Random Weighting, TMLR 2022"
    reduction = "sum"
    uses_gramian = False

    def weigh(self, gradients: Gradients) -> Weights:
        """Return random weights that add up to 1."""
        from torchjd.aggregation import RandomWeighting

        return Weights(RandomWeighting()(torch.empty(len(gradients.names), 0, dtype=torch.float64)))
