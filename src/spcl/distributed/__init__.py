"""One model trained by several processes on torch.distributed: they split tasks, or the batches of tasks."""

from spcl.distributed.dealing import deal
from spcl.distributed.engine import DistributedEngine
from spcl.distributed.sharded import ShardedEngine, whole
from spcl.distributed.world import World, join_world, leave_world

__all__ = ["DistributedEngine", "ShardedEngine", "World", "deal", "join_world", "leave_world", "whole"]
