"""The logits of new samples, which every rank stores in its copy of the memory."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spcl.distributed.shares import Shares
from spcl.distributed.world import World
from spcl.engine.model import Samples, SharedModel
from spcl.methods.base import Task

__all__ = ["shared_logits"]


def shared_logits(
    world: World, shares: Shares, model: SharedModel, batches: Sequence[Samples], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the logits of all batches by task, or what other heads give, given those of this rank's shares."""
    shapes = {group.task.name: _shape(model, group.task) for group in batches if group.task.classes is not None}
    if len(shapes) < len(batches):  # only a rank with samples knows what the heads of other tasks give
        found = world.gather_objects({name: tuple(each.shape[1:]) for name, each in own.items()})
        shapes = {name: shape for each in found for name, shape in each.items()} | shapes
    logits = {
        group.task.name: torch.zeros(len(group.y), *shapes[group.task.name], dtype=model.dtype, device=model.device)
        for group in batches
        if group.task.name in shapes
    }
    for name in logits.keys() & own.keys():
        mine = logits[name][shares.of_batch(len(logits[name]))]
        mine.copy_(own[name][: len(mine)])  # none of a pass that does not count
    return dict(zip(logits, world.sum_all(list(logits.values())), strict=True))


def _shape(model: SharedModel, task: Task) -> tuple[int, ...]:
    """Return the shape of a sample's logits."""
    return (sum(each.classes or 0 for each in (model.classifiers if model.has_joint_logits else [task])),)
