"""Replay memories: samples of past tasks within a fixed budget.

:class:`BalancedCoreset` gives every class of the finished tasks the same share (the paper's policy);
:class:`Reservoir` is a uniform sample of all samples seen so far, for unbounded streams. Subclass :class:`Memory` for
other policies.
"""

from spcl.memory.balanced import BalancedCoreset
from spcl.memory.base import Memory, ReplayBatch
from spcl.memory.registry import MEMORIES
from spcl.memory.reservoir import Reservoir
from spcl.memory.task_buffer import TaskBuffer

__all__ = ["MEMORIES", "BalancedCoreset", "Memory", "ReplayBatch", "Reservoir", "TaskBuffer"]
