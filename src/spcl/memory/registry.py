"""Memories by name."""

from collections.abc import Callable

from spcl.memory.balanced import BalancedCoreset
from spcl.memory.base import Memory
from spcl.memory.epochs import EpochCoreset
from spcl.memory.reservoir import Reservoir
from spcl.registry import Registry

__all__ = ["MEMORIES"]

MEMORIES: Registry[Callable[..., Memory]] = Registry(
    "memory", Memory, positional=1, keywords=("seed", "device", "dtype")
)
"""Classes of memories, or functions ``make(budget, *, seed, device, dtype, **options)`` of one.

>>> MEMORIES.make("reservoir", 100, seed=1).budget
100
"""

MEMORIES.register("balanced")(BalancedCoreset)
MEMORIES.register("epochs")(EpochCoreset)
MEMORIES.register("reservoir")(Reservoir)
