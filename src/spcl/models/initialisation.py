"""Weight initialisation of all backbones and heads."""

from typing import Literal

from torch import nn

Initialisation = Literal["he", "glorot"]


def initialise(module: nn.Module, how: Initialisation) -> None:
    """Initialise a module by He's or by Glorot's rule."""
    (initialise_glorot if how == "glorot" else initialise_he)(module)


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


def initialise_glorot(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers from ±√(6 / (fan-in + fan-out)) and zero the biases.

    Glorot and Bengio, 2010; the default of TensorFlow, in which the paper's networks were published.

    >>> layer = nn.Linear(500, 100)
    >>> initialise_glorot(layer)
    >>> round(layer.weight.abs().max().item(), 2), layer.bias.abs().max().item()
    (0.1, 0.0)
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
