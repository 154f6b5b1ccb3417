"""The processes that train one model together, on torch.distributed: they split tasks, or the batches of tasks."""

from spcl.engine.ranks import World, join_world, leave_world

__all__ = ["World", "join_world", "leave_world"]
