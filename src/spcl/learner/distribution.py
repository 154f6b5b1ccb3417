"""Ranks that train one learner together: what must be the same on all of them."""

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from spcl.batches import leaves
from spcl.distributed import World, whole
from spcl.engine.model import Samples, SharedModel
from spcl.errors import SpclError
from spcl.learner.low_memory import LowMemory
from spcl.methods.base import Method

__all__ = ["RankCheck"]

T = TypeVar("T")

ROUNDING = 1e-9
"""Relative difference of sums over the same batch that processors of different kinds may compute."""


class RankCheck:
    """Refuses, before a step, ranks that have different batches, backbones, methods or new heads.

    What one rank refuses before a step, all refuse.

    Args:
        world: the ranks.
        low_memory: the setting of the learner, which must not be True.
    """

    def __init__(self, world: World, low_memory: LowMemory) -> None:
        if low_memory is True:
            raise SpclError(
                "low_memory holds no gradients, but ranks exchange them; leave low_memory out, or distributed: every "
                "rank holds the gradients of its own tasks, and a part of all others"
            )
        self._world = world
        self._is_done = False
        self._heads: set[str] = set()

    def admitted(self, check: Callable[[], list[Samples]]) -> list[Samples]:
        """Return the batches that this rank has checked, once all ranks have; an error of any is raised on all.

        Raise an error on all ranks, too, unless their batches have the same sizes, targets and first inputs.
        """

        def compute() -> tuple[list[Samples], float]:
            samples = check()
            return samples, _batch_checksum(samples)

        samples, checksums = self._world.attempted(compute)
        largest = max(map(abs, checksums))
        for rank, checksum in enumerate(checksums):
            if abs(checksum - checksums[0]) > ROUNDING * largest:
                raise SpclError(
                    f"the ranks have different batches of {', '.join(group.task.name for group in samples)}: those of "
                    f"rank {rank} are not those of rank 0; give every rank the same batches, which are then split"
                )
        return samples

    def agreed(self, compute: Callable[[], T]) -> T:
        """Return what this rank computes; an error of any rank is raised on all of them."""
        return self._world.attempted(lambda: (compute(), 0.0))[0]

    def check(self, model: SharedModel, method: Method) -> None:
        """Raise an error on all ranks unless they have the same model and method; once is enough for each part."""
        if not self._is_done:
            self._world.check_same("backbones", _checksums(model.backbone))
            self._world.check_same("methods or scenarios", f"{method!r} in scenario {model.scenario!r}")
            self._is_done = True
        heads = {task.name: task.head for task in model.tasks.values() if task.head is not None}
        new = {name: _checksums(head) for name, head in heads.items() if name not in self._heads}
        if new:
            self._world.check_same("heads", new)
            self._heads |= new.keys()


def _checksums(module: nn.Module) -> dict[str, int]:
    return {name: _checksum(tensor) for name, tensor in module.state_dict().items()}


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(whole(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _batch_checksum(samples: Sequence[Samples]) -> float:
    """Return a number that tells batches apart by their sizes, targets and first inputs."""
    parts = [part for group in samples for part in (group.y, *(leaf[0] for leaf in leaves(group.x).values()))]
    sums = [part.double().sum() for part in parts]
    sizes = torch.tensor([float(len(group.y)) for group in samples], dtype=torch.float64)
    numbers = torch.cat([sizes, torch.stack([each.to(sums[0].device) for each in sums]).cpu()]).nan_to_num()
    return float(numbers @ torch.arange(1.0, len(numbers) + 1, dtype=torch.float64))
