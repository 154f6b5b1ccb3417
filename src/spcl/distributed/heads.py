"""The gradients of heads, which only the ranks with samples of their tasks have."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import SharedModel

__all__ = ["HeadGradients"]


class HeadGradients:
    """The gradients of heads, to be summed up over the ranks; a head that no rank has trained keeps none.

    Args:
        model: the shared model.
        gradients: those of the shared parameters, among which heads may be, too.
    """

    def __init__(self, model: SharedModel, gradients: GradientMatrix) -> None:
        self._model = model
        self._gradients = gradients
        self._trained: list[nn.Parameter] = []

    def _parameters(self) -> list[nn.Parameter]:
        weighed = set(self._gradients.parameters)
        return [parameter for parameter in self._model.head_parameters() if parameter not in weighed]

    def present(self) -> Tensor:
        """Return for every parameter of a head whether it has a gradient here."""
        return torch.tensor([parameter.grad is not None for parameter in self._parameters()], dtype=torch.float64)

    def note(self, counts: Tensor) -> None:
        """Remember which parameters have gradients, given how many ranks have those of each."""
        pairs = zip(self._parameters(), counts.tolist(), strict=True)
        self._trained = [parameter for parameter, count in pairs if count]

    def parts(self) -> list[Tensor]:
        """Return this rank's part of every gradient, to be summed up over the ranks."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._gradients_of_trained()

    def assign(self, sums: Sequence[Tensor]) -> None:
        """Assign the sums of the :meth:`parts`."""
        for gradient, total in zip(self._gradients_of_trained(), sums, strict=True):
            gradient.copy_(total)

    def _gradients_of_trained(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._trained if parameter.grad is not None]
