"""The gradients of heads, which only the ranks with samples of their tasks have."""

import torch
from torch import Tensor, nn

from spcl.distributed.world import World
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import SharedModel

__all__ = ["HeadGradients"]


class HeadGradients:
    """Sums the gradients of heads over the ranks; a head that no rank has trained keeps none.

    Args:
        model: the shared model.
        gradients: those of the shared parameters, among which heads may be, too.
        world: the ranks.
    """

    def __init__(self, model: SharedModel, gradients: GradientMatrix, world: World) -> None:
        self._model = model
        self._gradients = gradients
        self._world = world
        self._trained: list[nn.Parameter] = []

    def _parameters(self) -> list[nn.Parameter]:
        weighed = set(self._gradients.parameters)
        return [parameter for parameter in self._model.head_parameters() if parameter not in weighed]

    def present(self) -> list[float]:
        """Return for every parameter of a head whether it has a gradient here."""
        return [float(parameter.grad is not None) for parameter in self._parameters()]

    def note(self, counts: Tensor) -> None:
        """Remember which parameters have gradients, given how many ranks have those of each."""
        pairs = zip(self._parameters(), counts.tolist(), strict=True)
        self._trained = [parameter for parameter, count in pairs if count]

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the gradients over the ranks."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        if not gradients:
            return
        total = self._world.sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = torch.split_with_sizes(total, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
