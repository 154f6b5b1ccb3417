"""Weight initialisation of all backbones."""

from torch import nn

__all__ = ["initialise_he"]


def initialise_he(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers from N(0, 2 / fan-in) and zero the biases (He et al., 2015).

    >>> layer = nn.Linear(10_000, 100)
    >>> initialise_he(layer)
    >>> round(layer.weight.std().item() * 5_000**0.5, 1), layer.bias.abs().max().item()
    (1.0, 0.0)
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
