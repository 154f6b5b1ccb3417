"""The paper's memory as its authors published it: replayed in epochs."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs
from spcl.memory.balanced import BalancedCoreset

__all__ = ["EpochCoreset"]


class EpochCoreset(BalancedCoreset):
    """A balanced coreset whose samples are replayed in epochs: all once, in random order, before any twice.

    The last draw of an epoch gets the samples that are left, which may be few. A new epoch also begins whenever a task
    finishes.

    >>> import torch
    >>> memory = EpochCoreset(10, seed=0)
    >>> memory.start("digits", 2)
    >>> memory.observe("digits", torch.arange(60), torch.arange(60) % 2)
    >>> memory.finish("digits")
    >>> draws = [memory.draw(4)[0].x.tolist() for _ in range(3)]
    >>> [len(draw) for draw in draws], len(set(sum(draws, [])))
    ([4, 4, 2], 10)
    """

    draws_ahead = True
    _epoch: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # the positions that are left to draw, in order

    def pick(self, size: int, count: int) -> NDArray[np.int64]:
        """Return the next positions of the epoch, or the first of a new one."""
        if not len(self._epoch):
            self._epoch = self.generator.permutation(size)
        picked, self._epoch = self._epoch[:count], self._epoch[count:]
        return picked

    def draw_state(self) -> Any:
        """Return the state that drawing changes: the generator's, and what is left of the epoch."""
        return super().draw_state(), self._epoch

    def restore_draws(self, state: Any) -> None:
        """Restore from :meth:`draw_state`."""
        generator, self._epoch = state
        super().restore_draws(generator)

    def finish(self, task: str, model: Callable[[Inputs], Tensor] | None = None) -> None:
        """Make the samples of ``task`` replayable, and begin a new epoch."""
        self.check_finish(task)
        self._cancel_draws()
        self._epoch = self._epoch[:0]
        super().finish(task, model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; the samples are copies."""
        return {**super().state_dict(), "epoch": self._epoch.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        super().load_state_dict(state)
        self._epoch = np.array(state["epoch"], dtype=np.int64)
