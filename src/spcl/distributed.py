"""Training of one model by several processes on torch.distributed, which split tasks, or the batches of tasks."""

from spcl.engine.ranks import World, join_world, leave_world

__all__ = ["World", "join_world", "leave_world"]
