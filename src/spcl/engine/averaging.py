"""Averages of weights over the updates of a training."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

__all__ = ["WeightAverage"]


class WeightAverage:
    r"""The exponential moving average of parameters, :math:`\bar\theta \leftarrow d\,\bar\theta + (1 - d)\,\theta`.

    Args:
        decay: d, from 0 (no average) to below 1.

    >>> weight = nn.Parameter(torch.tensor([1.0]))
    >>> average = WeightAverage(0.75)
    >>> average.follow([nn.ParameterList([weight])])
    >>> _ = weight.data.fill_(5.0)
    >>> average.update()
    >>> with average.applied():
    ...     print(weight.data)
    tensor([2.])
    >>> weight.data
    tensor([5.])
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._parameters: list[nn.Parameter] = []
        self._averages: list[Tensor] = []

    @property
    def averages(self) -> Mapping[nn.Parameter, Tensor]:
        """The averaged weights by parameter; updates change them in place."""
        return MappingProxyType(dict(zip(self._parameters, self._averages, strict=True)))

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Average the trainable parameters of these modules from now on; that of a new one begins with its value."""
        known = self.averages
        self._parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
        self._averages = [known[each] if each in known else each.detach().clone() for each in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Include the present values, with one kernel launch for all parameters of a type."""
        if self._parameters:
            torch._foreach_lerp_(self._averages, self._parameters, 1.0 - self.decay)  # type: ignore[arg-type]

    def addresses(self) -> list[int]:
        """Return the addresses that :meth:`update` reads and writes."""
        return [tensor.data_ptr() for tensor in (*self._parameters, *self._averages)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the parameters have their averages as values within the block, without copying any."""
        before = [parameter.data for parameter in self._parameters]
        try:
            for parameter, average in zip(self._parameters, self._averages, strict=True):
                parameter.data = average
            yield
        finally:
            for parameter, value in zip(self._parameters, before, strict=True):
                parameter.data = value
