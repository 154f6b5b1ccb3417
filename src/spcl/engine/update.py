"""The update of the weights: clipping, one step of the optimiser, the average of the weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

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


FUSED = (Adam, AdamW, SGD)
"""Optimisers that can update all tensors of a group in one call."""

PLAIN = (Tensor, nn.Parameter)
"""Tensors that are not sharded."""


@contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimiser update all tensors of a group in one call, where it can and the user leaves it the choice.

    On a CPU PyTorch makes a dozen calls for every tensor by itself; with 64 heads that takes four times as long.
    """
    groups = [group for group in optimizer.param_groups if type(optimizer) in FUSED]
    before = [group["fused"] for group in groups]
    for group in groups:
        is_chosen = group["fused"] or (group["fused"] is None and _is_free(group))
        group["fused"] = (not _starts_momentum(optimizer, group)) if is_chosen else group["fused"]
    try:
        yield
    finally:
        for group, fused in zip(groups, before, strict=True):
            group["fused"] = fused


def _is_free(group: Mapping[str, Any]) -> bool:
    """Return whether a group leaves it to PyTorch how its tensors are updated, and one call can update all of them."""
    if group["foreach"] is not None or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    return all(map(_is_plain, group["params"]))


def _is_plain(parameter: Tensor) -> bool:
    """Return whether a tensor on a CPU, and its gradient, are numbers without gaps: the call ignores strides."""
    gradient = parameter.grad
    is_dense = gradient is None or (not gradient.is_sparse and gradient.is_contiguous())
    is_number = parameter.is_cpu and parameter.is_floating_point() and parameter.is_contiguous()
    return type(parameter) in PLAIN and is_number and is_dense


def _starts_momentum(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether some tensors, but not all, have no momentum yet, which the fused SGD cannot compute."""
    if not group.get("momentum"):
        return False
    trained = (parameter for parameter in group["params"] if parameter.grad is not None)
    return len({optimizer.state[parameter].get("momentum_buffer") is None for parameter in trained}) > 1


@dataclass(frozen=True)
class Update:
    """Clipping of the gradients, one step of the optimiser, and the average of the weights after it.

    Attributes:
        optimizer: the optimiser of all parameters.
        factor: of every group's initial learning rate in this step; None leaves the learning rates as they are.
        clip_norm: the largest norm of all gradients together, or None.
        average: of the weights, or None.
    """

    optimizer: Optimizer
    factor: float | None = None
    clip_norm: float | None = None
    average: WeightAverage | None = None

    def set_learning_rates(self) -> None:
        """Set the groups' learning rates.

        Those of ``capturable`` groups on a GPU are tensors that are filled in place, so that a captured optimiser reads
        them and need not be captured again.
        """
        if self.factor is None:
            return
        groups = self.optimizer.param_groups
        device = next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))
        for group in groups:
            is_new = "initial_lr" not in group  # also the name that PyTorch's schedulers use
            if is_new:
                group["initial_lr"] = float(group["lr"])
            rate, present = group["initial_lr"] * self.factor, group["lr"]
            if not (group.get("capturable") and device.type == "cuda"):
                group["lr"] = rate
            elif not is_new and isinstance(present, Tensor) and present.device == device:
                present.fill_(rate)
            else:
                group["lr"] = torch.full((), rate, device=device)

    def apply(self) -> None:
        """Update the weights at the present learning rates, without synchronising with a GPU."""
        if self.clip_norm is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            clip_grad_norm_(parameters, self.clip_norm)
        with _fused(self.optimizer):
            self.optimizer.step()
        if self.average is not None:
            self.average.update()
