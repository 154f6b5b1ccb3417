"""The gradients of heads that are computed together."""

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor, nn

__all__ = ["HeadGradients"]


class HeadGradients:
    """One tensor for the gradients of parameters of one shape, in which steps with the same parameters write them.

    Making a view for each parameter anew takes longer than computing the gradients of small heads.

    >>> parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    >>> gradients = HeadGradients()
    >>> gradients.of(parameters).shape
    torch.Size([2, 3])
    >>> gradients.of(parameters) is gradients.of(parameters)
    True
    """

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = []
        self._stacked = torch.empty(0)
        self._views: Sequence[Tensor] = []

    def of(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the tensor, with one row for each of these parameters."""
        first = parameters[0]
        is_known = len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        if not is_known or self._stacked.dtype != first.dtype or self._stacked.device != first.device:
            self._parameters = parameters
            self._stacked = torch.empty(len(parameters), *first.shape, dtype=first.dtype, device=first.device)
            self._views = self._stacked.unbind()
        return self._stacked

    def assign(self) -> None:
        """Add the gradients to those of the parameters."""
        for parameter, gradient in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
