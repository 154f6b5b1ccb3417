"""ReplayBatch memories: what a model keeps of the tasks it has seen, within a fixed budget of samples.

:class:`BalancedCoreset` gives every class of the finished tasks the same share (the paper's); :class:`Reservoir` is a
uniform sample of everything seen so far, for streams without an end. Both are a few lines on top of :class:`Memory`,
and so is a policy of your own.
"""

from spcl.memory.balanced import BalancedCoreset
from spcl.memory.base import Memory, ReplayBatch
from spcl.memory.reservoir import Reservoir
from spcl.memory.task_buffer import TaskBuffer

__all__ = ["BalancedCoreset", "Memory", "ReplayBatch", "Reservoir", "TaskBuffer"]
