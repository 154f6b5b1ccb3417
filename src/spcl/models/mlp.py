"""A multi-layer perceptron, the backbone of PS-EMNIST."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from spcl.models.backbone import BACKBONES, Initialisation, InputSpec, initialise, standardised


class MLP(nn.Module):
    """Linear layers, each followed by ReLU; samples of any shape are flattened.

    The default widths, 784–128–64, are used for PS-EMNIST (paper §5.2 and its published code).

    >>> import torch
    >>> model = MLP(inputs=28 * 28)
    >>> model(torch.zeros(5, 1, 28, 28)).shape, model.feature_dim
    (torch.Size([5, 64]), 64)
    """

    def __init__(self, inputs: int, hidden: Sequence[int] = (128, 64), init: Initialisation = "he") -> None:
        super().__init__()
        layers = [layer for sizes in pairwise((inputs, *hidden)) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *layers)
        self.feature_dim = (inputs, *hidden)[-1]
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch."""
        features: Tensor = self.layers(x)
        return features


@BACKBONES.register("mlp")
def mlp(
    inputs: InputSpec, hidden: Sequence[int] = (128, 64), init: Initialisation = "he", standardise: bool = False
) -> nn.Module:
    """Fully connected layers, for samples of any shape; the network of PS-EMNIST.

    With ``standardise``, floating-point features are standardised first, see :class:`spcl.models.Standardise`.
    """
    network = MLP(math.prod(inputs.shape), hidden, init)
    return standardised(inputs, network) if standardise and inputs.dtype.is_floating_point else network
