"""Ranks that train one learner together: what must be the same on all of them."""

import zlib

from torch import Tensor

from spcl.distributed import World
from spcl.engine.model import SharedModel
from spcl.errors import SpclError
from spcl.learner.low_memory import LowMemory
from spcl.methods.base import Method

__all__ = ["RankCheck"]


class RankCheck:
    """Refuses, before the first step, ranks that have different models or methods.

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

    def check(self, model: SharedModel, method: Method) -> None:
        """Raise an error on all ranks unless they have the same model and method; once is enough."""
        if self._is_done:
            return
        weights = {name: _checksum(tensor) for name, tensor in model.backbone.state_dict().items()}
        self._world.check_same("backbones", weights)
        self._world.check_same("methods or scenarios", f"{method!r} in scenario {model.scenario!r}")
        self._is_done = True


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes())
