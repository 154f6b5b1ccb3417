"""Batch-norm's running averages after passes that several ranks have made, as after one process has made all."""

from collections.abc import Iterable, Sequence

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

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Remember the averages before the passes."""
        layers = [layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._layers = [layer for layer in layers if layer.running_mean is not None and layer.training]
        self._remember()

    @torch.no_grad()
    def _remember(self) -> None:
        self._before = [(_averages(layer), _count(layer)) for layer in self._layers]
        self._passes = torch.zeros(self._world.tasks.size, self._world.data.size, len(self._layers))

    def passes(self) -> Tensor:
        """Return how often this rank, in its row, has updated every layer since; zeros in the rows of others."""
        passes = torch.zeros(self._world.size, len(self._layers), dtype=torch.float64)
        for column, (layer, (_, count)) in enumerate(zip(self._layers, self._before, strict=True)):
            passes[self._world.rank, column] = _count(layer) - count
        return passes

    def note(self, passes: Tensor) -> None:
        """Remember the sum of the :meth:`passes` of all ranks."""
        self._passes = passes.view(self._world.tasks.size, self._world.data.size, -1)

    def parts(self) -> list[Tensor]:
        """Return this rank's part of the change of every layer's averages, to be summed up over the ranks."""
        if not bool(self._passes.any()):
            return []
        return [
            (self._part(self._passes[:, :, column], layer, count) * (_averages(layer) - before)).to(_dtype(layer))
            for column, (layer, (before, count)) in enumerate(zip(self._layers, self._before, strict=True))
        ]

    @torch.no_grad()
    def assign(self, changes: Sequence[Tensor]) -> None:
        """Assign the averages that one process would have, given the sums of the :meth:`parts`."""
        passes = self._passes.amax(dim=1).sum(dim=0).tolist()
        for layer, (before, count), change, added in zip(self._layers, self._before, changes, passes, strict=False):
            _assign(layer, before + change, count + int(added))
        self._remember()

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


def _dtype(layer: _BatchNorm) -> torch.dtype:
    assert layer.running_mean is not None
    return layer.running_mean.dtype


def _count(layer: _BatchNorm) -> int:
    return 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)
