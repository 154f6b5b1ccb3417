"""The logits of new samples, which every rank stores in its copy of the memory."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spcl.distributed.shares import Shares
from spcl.distributed.world import World
from spcl.engine.model import Samples, SharedModel

__all__ = ["shared_logits"]


def shared_logits(
    world: World, shares: Shares, model: SharedModel, batches: Sequence[Samples], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the logits of all classifiers' batches by task, given those of this rank's shares."""
    shapes = {group.task.name: _shape(model, group) for group in batches if group.task.classes is not None}
    logits = {name: torch.zeros(shape, dtype=model.dtype, device=model.device) for name, shape in shapes.items()}
    for name in shapes.keys() & own.keys():
        mine = logits[name][shares.of_batch(len(logits[name]))]
        mine.copy_(own[name][: len(mine)])  # none of a pass that does not count
    return dict(zip(logits, world.sum_all(list(logits.values())), strict=True))


def _shape(model: SharedModel, group: Samples) -> torch.Size:
    tasks = model.classifiers if model.has_joint_logits else [group.task]
    return torch.Size([len(group.y), sum(task.classes or 0 for task in tasks)])
