"""Training of one model by several processes on torch.distributed, which split tasks, or the batches of tasks."""

from spcl.engine.ranks.engine import DistributedEngine
from spcl.engine.ranks.sharded import ShardedEngine, whole
from spcl.engine.ranks.world import World, deal, join_world, leave_world

__all__ = ["DistributedEngine", "ShardedEngine", "World", "deal", "join_world", "leave_world", "whole"]
