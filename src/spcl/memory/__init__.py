"""Replay memories: samples of past tasks within a fixed budget.

:class:`BalancedCoreset` gives every class of the finished tasks the same share (the paper's policy);
:class:`EpochCoreset` keeps the same samples and replays them in epochs, as the code of the paper's authors does;
:class:`Reservoir` is a uniform sample of all samples seen so far, for unbounded streams. Subclass :class:`Memory` for
other policies.
"""

from spcl.memory.balanced import BalancedCoreset, EpochCoreset
from spcl.memory.base import MEMORIES, Memory, ReplayBatch, SourceBuffer
from spcl.memory.reservoir import Reservoir

__all__ = ["MEMORIES", "BalancedCoreset", "EpochCoreset", "Memory", "ReplayBatch", "Reservoir", "SourceBuffer"]
