"""A sequence of modules as a backbone."""

from torch import nn

__all__ = ["Backbone"]


class Backbone(nn.Sequential):
    """A sequence of modules with the `feature_dim` of the last one, or None if that has none.

    >>> from spcl.models import MLP, Normalise
    >>> Backbone(Normalise(mean=0.13, std=0.31), MLP(784)).feature_dim
    64
    """

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.feature_dim: int | None = getattr(modules[-1], "feature_dim", None)
