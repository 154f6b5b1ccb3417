"""Averages of weights over the updates of a training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

__all__ = ["WeightAverage"]

WARM_UP = 9
"""Sets how fast a young average follows: after n updates it is that of the last (10 + n) / 9 or so."""


class WeightAverage:
    r"""The exponential moving average of parameters and floating-point buffers over updates,
    :math:`\bar\theta \leftarrow \bar\theta + r_n (\theta - \bar\theta)`.

    The rate of the n-th update of a module, counted from 0, is :math:`r_n = \max(1 - d,\ 9 / (10 + n))`, so that an
    average forgets where it began: that of a head which is added late soon catches up. Buffers, i.e. batch-norm's
    running averages, are averaged with the weights that they belong to.

    Args:
        decay: d, from 0 (no average) to below 1.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> _ = layer.weight.data.fill_(1.0)
    >>> average = WeightAverage(0.75)
    >>> average.follow([layer])
    >>> _ = layer.weight.data.fill_(5.0)
    >>> average.update()
    >>> with average.applied():
    ...     print(layer.weight.data)
    tensor([[4.6000]])
    >>> layer.weight.data
    tensor([[5.]])
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._tensors: list[Tensor] = []
        self._averages: list[Tensor] = []
        self._modules: dict[nn.Module, slice] = {}  # where the tensors of each are
        self._updates = torch.zeros(0)  # of each module, on its device: a captured update counts, too

    @property
    def averages(self) -> Mapping[Tensor, Tensor]:
        """The averages by parameter or buffer; updates change them in place."""
        return MappingProxyType(dict(zip(self._tensors, self._averages, strict=True)))

    @property
    def updates(self) -> dict[nn.Module, int]:
        """The number of updates of every module; reading it synchronises with a GPU."""
        return {module: int(count) for module, count in zip(self._modules, self._updates.tolist(), strict=True)}

    def follow(self, modules: Iterable[nn.Module], updates: Mapping[nn.Module, int] | None = None) -> None:
        """Average what these modules train from now on; the average of something new begins with its value.

        Args:
            modules: all modules to average.
            updates: their numbers of updates so far; those counted here if not given.
        """
        known, updates = self.averages, self.updates if updates is None else updates
        owned = {module: list(_averaged(module)) for module in modules}
        self._tensors = [each for own in owned.values() for each in own]
        self._averages = [known[each] if each in known else each.detach().clone() for each in self._tensors]
        self._modules = dict(zip(owned, _slices([len(own) for own in owned.values()]), strict=True))
        counts = [float(updates.get(module, 0)) for module in owned]
        self._updates = torch.tensor(counts, device=self._tensors[0].device if self._tensors else None)

    @torch.no_grad()
    def update(self) -> None:
        """Include the present values, with few kernel launches for all of them."""
        if not self._tensors:
            return
        rates = (WARM_UP / (WARM_UP + 1 + self._updates)).clamp_(min=1.0 - self.decay).unbind()
        self._updates += 1
        averages = self._local(self._averages)
        changes = torch._foreach_sub(self._local(self._tensors), averages)
        for own, rate in zip(self._modules.values(), rates, strict=True):
            if changes[own]:
                torch._foreach_mul_(changes[own], rate)
        torch._foreach_add_(averages, changes)

    def addresses(self) -> list[int]:
        """Return the addresses that :meth:`update` reads and writes."""
        return [tensor.data_ptr() for tensor in (*self._tensors, *self._averages, self._updates)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let parameters and buffers have their averages as values within the block, without copying any."""
        before = [tensor.data for tensor in self._tensors]
        try:
            for tensor, average in zip(self._tensors, self._averages, strict=True):
                tensor.data = average
            yield
        finally:
            for tensor, value in zip(self._tensors, before, strict=True):
                tensor.data = value

    def _local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what this process holds of the tensors."""
        return list(tensors)


def _averaged(module: nn.Module) -> Iterator[Tensor]:
    """Yield the trainable parameters and the floating-point buffers of a module."""
    yield from (parameter for parameter in module.parameters() if parameter.requires_grad)
    yield from (buffer for buffer in module.buffers() if buffer.is_floating_point())


def _slices(lengths: Sequence[int]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length
