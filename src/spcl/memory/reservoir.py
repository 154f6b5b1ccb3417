"""A uniform sample of all samples seen so far, for unbounded streams."""

import numpy as np
from numpy.typing import NDArray

from spcl.memory.base import MEMORIES, Memory


@MEMORIES.register("reservoir")
class Reservoir(Memory):
    """A uniform random sample of all samples observed, over all sources (reservoir sampling, Vitter 1985).

    Samples can be drawn while their sources still run. Memory stores the logits given to :meth:`observe`.

    >>> import torch
    >>> memory = Reservoir(100, seed=0)
    >>> memory.start("camera", 2)
    >>> memory.start("lidar", None)
    >>> for _ in range(50):
    ...     memory.observe("camera", torch.zeros(30, 3, dtype=torch.uint8), torch.zeros(30, dtype=torch.int64))
    ...     memory.observe("lidar", torch.zeros(10, 8), torch.zeros(10, 2))
    >>> len(memory), memory.counts()
    (100, {'camera': [75, 0], 'lidar': [25]})
    """

    draws_ahead = True

    def choose(self) -> dict[str, NDArray[np.bool_]]:
        """Keep the lowest ranks over all sources."""
        ranks = np.concatenate([buffer.ranks for buffer in self.buffers.values()])
        if len(ranks) <= self.budget:
            return {}
        threshold = np.partition(ranks, self.budget)[self.budget]
        ends = np.cumsum([len(buffer.ranks) for buffer in self.buffers.values()])
        losing = set(np.searchsorted(ends, np.flatnonzero(ranks >= threshold), side="right").tolist())
        sources = enumerate(self.buffers.items())
        return {source: buffer.ranks < threshold for place, (source, buffer) in sources if place in losing}
