"""Ranks that train one learner together: what must be the same on all of them."""

import zlib

from torch import Tensor

from spcl.distributed import World
from spcl.engine.model import SharedModel
from spcl.errors import SpclError
from spcl.learner.low_memory import LowMemory
from spcl.methods.base import Method

__all__ = ["check_ranks"]


def check_ranks(world: World, model: SharedModel, method: Method, low_memory: LowMemory) -> None:
    """Raise an error on all ranks unless all have the same model and method, which can be distributed."""
    if low_memory is True:
        raise SpclError(
            "low_memory holds no gradients, but ranks exchange them; leave low_memory out, or distributed: every rank "
            "holds the gradients of its own tasks, and a part of all others"
        )
    weights = {name: _checksum(tensor) for name, tensor in model.backbone.state_dict().items()}
    world.check_same("backbones", weights)
    world.check_same("methods or scenarios", f"{method!r} in scenario {model.scenario!r}")


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(-1).numpy().tobytes())
