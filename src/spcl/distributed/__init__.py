"""One model trained by several processes on torch.distributed: tasks are split over them, results stay the same."""

from spcl.distributed.dealing import deal
from spcl.distributed.engine import DistributedEngine
from spcl.distributed.world import World, join_world, leave_world

__all__ = ["DistributedEngine", "World", "deal", "join_world", "leave_world"]
