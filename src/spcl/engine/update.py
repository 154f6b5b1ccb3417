"""The update of the weights: clip the gradients, make one step of the optimiser, average the weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

WARM_UP = 9
"""Sets how fast a new average follows: after n updates it covers about the last (10 + n) / 9 updates."""


class WeightAverage:
    r"""The exponential moving average of parameters and floating-point buffers over updates,
    :math:`\bar\theta \leftarrow \bar\theta + r_n (\theta - \bar\theta)`.

    The rate of the n-th update of a module, counted from 0, is :math:`r_n = \max(1 - d,\ 9 / (10 + n))`, so an average
    forgets its starting value, and a head added late catches up. Floating-point buffers, such as batch-norm's running
    statistics, are averaged like the weights.

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
        self._modules: dict[nn.Module, slice] = {}  # the module's part of both lists
        self._updates = torch.zeros(0)  # by module; a tensor, so that an update captured in a CUDA graph counts itself

    @property
    def averages(self) -> Mapping[Tensor, Tensor]:
        """The averages by parameter or buffer; updates change them in place."""
        return MappingProxyType(dict(zip(self._tensors, self._averages, strict=True)))

    @property
    def updates(self) -> dict[nn.Module, int]:
        """The number of updates by module; reading it synchronises with a GPU."""
        return {module: int(count) for module, count in zip(self._modules, self._updates.tolist(), strict=True)}

    def follow(self, modules: Iterable[nn.Module], updates: Mapping[nn.Module, int] | None = None) -> None:
        """Average exactly these modules from now on; the average of a new tensor starts at its present value.

        Args:
            modules: all modules to average.
            updates: how many updates each module has had; by default the numbers counted so far.
        """
        known, updates = self.averages, self.updates if updates is None else updates
        seen: set[Tensor] = set()
        owned = {module: list(_averaged(module, seen)) for module in modules}
        ends = accumulate(map(len, owned.values()), initial=0)
        self._tensors = [each for own in owned.values() for each in own]
        self._averages = [known[each] if each in known else each.detach().clone() for each in self._tensors]
        self._modules = dict(zip(owned, (slice(*both) for both in pairwise(ends)), strict=True))
        counts = [float(updates.get(module, 0)) for module in owned]
        self._updates = torch.tensor(counts, device=self._tensors[0].device if self._tensors else None)

    @torch.no_grad()
    def exchange(self, before: nn.Module, after: nn.Module) -> None:
        """Follow a larger module in place of another one; its first entries have the averages of the smaller one's."""
        known, updates = self.averages, self.updates
        modules = [after if module is before else module for module in self._modules]
        self.follow(modules, {after if module is before else module: count for module, count in updates.items()})
        present = self.averages
        for old, new in zip(before.parameters(), after.parameters(), strict=True):
            if old in known and new in present:
                present[new][: len(old)] = known[old]

    @torch.no_grad()
    def update(self) -> None:
        """Include the present values, by a few kernel launches for all tensors together."""
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
        """Give parameters and buffers their averages as values within the block, without copying."""
        before = [tensor.data for tensor in self._tensors]
        try:
            for tensor, average in zip(self._tensors, self._averages, strict=True):
                tensor.data = average
            yield
        finally:
            for tensor, value in zip(self._tensors, before, strict=True):
                tensor.data = value

    def _local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of the tensors that this process holds: here, all of each."""
        return list(tensors)


def _averaged(module: nn.Module, seen: set[Tensor]) -> Iterator[Tensor]:
    """Yield a module's trainable parameters and floating-point buffers, except what earlier modules had."""
    for tensor in (*module.parameters(), *module.buffers()):
        is_averaged = tensor.requires_grad if isinstance(tensor, nn.Parameter) else tensor.is_floating_point()
        if is_averaged and tensor not in seen:
            seen.add(tensor)
            yield tensor


FUSED = (Adam, AdamW, SGD)
"""Optimisers that can update all tensors of a group in one call, PyTorch's "fused" implementation."""

PLAIN = (Tensor, nn.Parameter)
"""Tensors that are not sharded."""


@contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """Make the optimiser use its fused implementation within the block, unless the user has chosen another one.

    By default PyTorch makes a dozen calls per tensor on a CPU; with 64 heads that takes four times as long.
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
    """Return whether the group lets PyTorch choose the implementation, and the fused one can handle all its tensors."""
    if group["foreach"] is not None or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    return all(map(_is_plain, group["params"]))


def _is_plain(parameter: Tensor) -> bool:
    """Return whether tensor and gradient are dense, contiguous floats on a CPU: the fused call ignores strides."""
    gradient = parameter.grad
    is_dense = gradient is None or (not gradient.is_sparse and gradient.is_contiguous())
    is_number = parameter.is_cpu and parameter.is_floating_point() and parameter.is_contiguous()
    return type(parameter) in PLAIN and is_number and is_dense


def _starts_momentum(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether some tensors have momentum already and others do not, which the fused SGD cannot handle."""
    if not group.get("momentum"):
        return False
    trained = (parameter for parameter in group["params"] if parameter.grad is not None)
    return len({optimizer.state[parameter].get("momentum_buffer") is None for parameter in trained}) > 1


@dataclass(frozen=True)
class Update:
    """One update: clip the gradients, make a step of the optimiser, update the average of the weights.

    Attributes:
        optimizer: the optimiser of all parameters.
        factor: multiplies every group's initial learning rate in this step; None leaves learning rates unchanged.
        clip_norm: the largest norm of all gradients together; None for no clipping.
        average: the average of the weights, or None.
    """

    optimizer: Optimizer
    factor: float | None = None
    clip_norm: float | None = None
    average: WeightAverage | None = None

    def set_learning_rates(self) -> None:
        """Set the groups' learning rates.

        Learning rates of ``capturable`` groups on a GPU are tensors, filled in place, so that a captured graph stays
        valid.
        """
        if self.factor is None:
            return
        groups = self.optimizer.param_groups
        device = next((parameter.device for group in groups for parameter in group["params"]), torch.device("cpu"))
        for group in groups:
            is_new = "initial_lr" not in group  # PyTorch's schedulers use the same name
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
        """Update the weights with the present learning rates, without synchronising with a GPU."""
        if self.clip_norm is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            clip_grad_norm_(parameters, self.clip_norm)
        with _fused(self.optimizer):
            self.optimizer.step()
        if self.average is not None:
            self.average.update()
