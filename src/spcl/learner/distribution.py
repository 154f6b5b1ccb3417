"""Ranks that train one learner together: what must be the same on all of them."""

import zlib

from torch import Tensor, nn

from spcl.distributed import World, whole
from spcl.engine.model import SharedModel
from spcl.errors import SpclError
from spcl.learner.low_memory import LowMemory
from spcl.methods.base import Method

__all__ = ["RankCheck"]


class RankCheck:
    """Refuses, before a step, ranks that have different backbones, methods or new heads.

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
    return zlib.crc32(whole(tensor.detach()).cpu().contiguous().numpy().tobytes())
