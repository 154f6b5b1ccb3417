"""MaxDO, maximum discrepancy optimisation, from the Gramian."""

import numpy as np
import torch
from torch import Tensor
from torchjd.aggregation import Weighting
from torchjd.linalg import PSDMatrix

from spcl.aggregation.gramians import host_gramian
from spcl.aggregation.min_norm import min_norm_weights

__all__ = ["MaxDOWeighting"]


class MaxDOWeighting(Weighting[PSDMatrix]):
    r"""Sum of the convex combinations nearest to each gradient and the minimum-norm combination of all gradients.

    For each gradient, the combination is of the other gradients, and nearest in the asymmetric gradient distance

    .. math:: \mathrm{AGD}(x \to y) = \frac{\|x-y\|}{\|x-y\| + \|y\|}

    from the combination x to the task's gradient y. As it grows with :math:`\|x-y\|`, the nearest combination
    :math:`\sum_{j\ne i} w_j g_j` is the minimum-norm combination of the differences :math:`g_j - g_i`, whose Gramian is
    :math:`C_{jk} - C_{ji} - C_{ik} + C_{ii}`. The T + 1 sets of weights are added and divided by T + 1.

    Lyu et al., *Measuring Asymmetric Gradient Discrepancy in Parallel Continual Learning*, ICCV 2023.

    >>> import torch
    >>> MaxDOWeighting()(torch.eye(2))
    tensor([0.5000, 0.5000])
    >>> MaxDOWeighting()(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))      # (e2 + e1 + (0.8, 0.2)) / 3
    tensor([0.6000, 0.4000])
    """

    def forward(self, gramian: PSDMatrix, /) -> Tensor:
        """Return the weights, in the Gramian's dtype and on its device."""
        C = host_gramian(gramian)
        C = (C + C.T) / 2  # exactly symmetric: rounding would outweigh small differences of large gradients
        weights = min_norm_weights(gramian).numpy()
        if len(C) > 1:
            for i in range(len(C)):
                others = np.delete(np.arange(len(C)), i)
                differences = C - C[:, [i]] - C[[i], :] + C[i, i]
                weights[others] += min_norm_weights(torch.from_numpy(differences[np.ix_(others, others)])).numpy()
            weights /= len(C) + 1
        return torch.from_numpy(weights).to(gramian)
