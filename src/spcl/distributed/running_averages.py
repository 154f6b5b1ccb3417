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
    rank, and :math:`k'` on the ranks with later tasks, one process has

    .. math:: r_0 + \sum_\text{ranks} (1 - m)^{k'} \left(r - r_0\right).

    Without momentum the average is over all batches. Where ranks split batches, statistics are those of a rank's share,
    and the mean over the ranks is taken of what they add.

    Args:
        world: the ranks, of which task groups are in the order in which one process would make their passes.
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
        by_group = counts.view(self._world.tasks.size, self._world.data.size, -1)
        changes = [
            (self._part(by_group[:, :, column], layer, count) * (_averages(layer) - before)).flatten()
            for column, (layer, (before, count)) in enumerate(zip(self._layers, self._before, strict=True))
        ]
        parts = torch.split_with_sizes(self._world.sum(torch.cat(changes)), [len(each) for each in changes])
        passes = by_group.amax(dim=1).sum(dim=0).tolist()
        for layer, (before, count), change, added in zip(self._layers, self._before, parts, passes, strict=True):
            _assign(layer, before + change.view_as(before), count + int(added))

    def _part(self, counts: Tensor, layer: _BatchNorm, count: int) -> float:
        """Return how much the change that this rank has made counts, given the updates by task group and rank."""
        group, rank = self._world.tasks.rank, self._world.data.rank
        passes, own, together = counts.amax(dim=1), float(counts[group, rank]), float(counts[group].sum())
        if not own:
            return 0.0
        if layer.momentum is None:
            return (count + own) / (count + float(passes.sum())) * float(passes[group]) / together
        return float((1.0 - layer.momentum) ** float(passes[group + 1 :].sum())) * own / together


def _assign(layer: _BatchNorm, averages: Tensor, count: int) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.copy_(averages[0])
    layer.running_var.copy_(averages[1])
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(count)


def _averages(layer: _BatchNorm) -> Tensor:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return torch.stack([layer.running_mean, layer.running_var]).double()


def _count(layer: _BatchNorm) -> int:
    return 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)
