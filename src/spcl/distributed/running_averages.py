"""Batch-norm's running averages after passes that several ranks have made, as after one process has made all."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spcl.distributed.world import World

__all__ = ["RunningAverages"]


class RunningAverages:
    r"""The running averages of batch-norm layers, which every rank updates by the batches of its own tasks.

    An update with the statistics s and the momentum m is :math:`r \leftarrow (1 - m)\, r + m\, s`. After k updates on a
    rank and K on all, of which :math:`k'` come after those of this rank, one process has

    .. math:: (1 - m)^K r_0 + \sum_\text{ranks} (1 - m)^{k'} \left(r - (1 - m)^k r_0\right).

    Without momentum the average is over all batches.

    Args:
        world: the ranks, in the order in which one process would make their passes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._layers: list[_BatchNorm] = []
        self._before: list[tuple[Tensor, int]] = []

    @torch.no_grad()
    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Remember the averages before the passes."""
        layers = [layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._layers = [layer for layer in layers if layer.running_mean is not None and layer.training]
        self._before = [(_averages(layer), _count(layer)) for layer in self._layers]

    def counts(self) -> list[float]:
        """Return how many updates this rank has made of every layer since."""
        pairs = zip(self._layers, self._before, strict=True)
        return [float(_count(layer) - count) for layer, (_, count) in pairs]

    @torch.no_grad()
    def merge(self, counts: Tensor) -> None:
        """Merge the updates of all ranks, given their :meth:`counts`, one row per rank."""
        if not self._layers or not bool(counts.any()):
            return
        changes = []
        for column, layer in enumerate(self._layers):
            before, count = self._before[column]
            own, later = float(counts[self._world.rank, column]), float(counts[self._world.rank + 1 :, column].sum())
            total = float(counts[:, column].sum())
            if layer.momentum is None:
                change = ((count + own) * _averages(layer) - count * before) / max(count + total, 1.0)
            else:
                left = (1.0 - layer.momentum) ** own
                change = (1.0 - layer.momentum) ** later * (_averages(layer) - left * before)
            changes.append(change.flatten())
        parts = torch.split_with_sizes(self._world.sum(torch.cat(changes)), [len(each) for each in changes])
        for column, (layer, change) in enumerate(zip(self._layers, parts, strict=True)):
            self._assign(layer, *self._before[column], change, float(counts[:, column].sum()))

    def _assign(self, layer: _BatchNorm, before: Tensor, count: int, change: Tensor, total: float) -> None:
        left = count / max(count + total, 1.0) if layer.momentum is None else (1.0 - layer.momentum) ** total
        mean, variance = left * before + change.view_as(before)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(count + int(total))


def _averages(layer: _BatchNorm) -> Tensor:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return torch.stack([layer.running_mean, layer.running_var]).double()


def _count(layer: _BatchNorm) -> int:
    return 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)
