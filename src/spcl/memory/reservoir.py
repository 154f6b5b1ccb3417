"""A uniform sample of everything seen so far, for streams without an end."""

import numpy as np
from numpy.typing import NDArray

from spcl.memory.base import Memory

__all__ = ["Reservoir"]


class Reservoir(Memory):
    """A uniform random sample of all samples ever observed, of all tasks together (a reservoir, Vitter 1985).

    It fills while tasks run and can be drawn from at once. Logits are those given to :meth:`observe`.

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

    def choose(self) -> dict[str, NDArray[np.bool_]]:
        """Keep the lowest ranks of all."""
        ranks = np.concatenate([buffer.ranks for buffer in self.buffers.values()])
        if len(ranks) <= self.budget:
            return {}
        first_to_go = np.partition(ranks, self.budget)[self.budget]
        return {task: buffer.ranks < first_to_go for task, buffer in self.buffers.items()}
