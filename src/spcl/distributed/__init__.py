"""One model trained by several processes on torch.distributed: they split tasks, or the batches of tasks."""

from spcl.distributed.dealing import deal
from spcl.distributed.engine import DistributedEngine
from spcl.distributed.sharded import (
    ShardedAverage,
    ShardedEngine,
    check_sharded,
    is_sharded,
    refuse_sharded,
    sharded_like,
    whole,
)
from spcl.distributed.world import World, join_world, leave_world

__all__ = [
    "DistributedEngine",
    "ShardedAverage",
    "ShardedEngine",
    "World",
    "check_sharded",
    "deal",
    "is_sharded",
    "join_world",
    "leave_world",
    "refuse_sharded",
    "sharded_like",
    "whole",
]
