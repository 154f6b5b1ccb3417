"""Class-balanced coresets of the finished tasks: the memory of the paper, and the memory in its authors' code."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs
from spcl.memory.base import MEMORIES, Memory


@MEMORIES.register("balanced")
class BalancedCoreset(Memory):
    """A class-balanced random coreset of the finished tasks (the paper's replay memory).

    Nothing can be drawn until the first task finishes. Then the ``C`` classes of the finished tasks share the budget
    equally: ``⌊budget/C⌋`` samples each, and one more for the first ``budget mod C`` classes in the order in which
    tasks started. Whenever a task finishes, the shares shrink and random samples of every class are evicted. A class
    with fewer samples than its share leaves the rest of its share unused.

    While a task runs, a uniform sample of each of its classes is kept as candidates, as many as the task would get if
    it finished now. Logits are computed by the ``model`` given to :meth:`finish`.

    >>> import torch
    >>> memory = BalancedCoreset(10, seed=0)
    >>> for task, classes in ("digits", 2), ("letters", 3):
    ...     memory.start(task, classes)
    ...     memory.observe(task, torch.rand(60, 4), torch.arange(60) % classes)
    >>> memory.draw(4), len(memory)
    ([], 0)
    >>> memory.finish("letters")
    >>> memory.counts()
    {'letters': [4, 3, 3]}
    >>> memory.finish("digits")
    >>> memory.counts()
    {'digits': [2, 2], 'letters': [2, 2, 2]}
    >>> [(batch.task, tuple(batch.x.shape)) for batch in memory.draw(32)]
    [('digits', (4, 4)), ('letters', (6, 4))]
    """

    draws_ahead = True
    replays_running = False
    keeps_observed_logits = False  # they would be outdated when the task ends
    _shared_by = 0  # number of finished classes at the last call of `choose`

    def choose(self) -> dict[str, NDArray[np.bool_]]:
        """Keep the lowest ranks of every class, up to its share."""
        kept = {}
        finished = sum(buffer.classes for buffer in self.buffers.values() if not buffer.running)
        before = 0
        for task, buffer in self.buffers.items():
            if len(buffer.ranks) > buffer.size or finished != self._shared_by:  # otherwise nothing has changed
                total = finished + (buffer.classes if buffer.running else 0)
                positions = before + np.arange(buffer.classes)
                shares = self.budget // total + (positions < self.budget % total)
                kept[task] = _lowest(buffer.ranks, buffer.labels, shares)
            before += 0 if buffer.running else buffer.classes
        self._shared_by = finished
        return kept

    def finish(self, task: str, model: Callable[[Inputs], Tensor] | None = None) -> None:
        """Make the samples of ``task`` replayable, with the logits that ``model`` gives for them.

        If the model raises, for example out of memory, the task keeps running and can be finished again.
        """
        super().finish(task)
        if model is not None:
            try:
                self.buffers[task].store_logits(model)
            except BaseException:
                self.buffers[task].running = True
                raise


def _lowest(ranks: NDArray[np.float64], labels: NDArray[np.int64], shares: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the samples with the lowest ranks of every class, up to its share."""
    counts = np.bincount(labels, minlength=len(shares))
    if (counts <= shares).all():
        return np.ones(len(ranks), dtype=bool)
    order = np.lexsort((ranks, labels))
    position = np.arange(len(ranks)) - (counts.cumsum() - counts).repeat(counts)  # of each sample in its class, by rank
    mask = np.empty(len(ranks), dtype=bool)
    mask[order] = position < shares.repeat(counts)
    return mask


@MEMORIES.register("epochs")
class EpochCoreset(BalancedCoreset):
    """A balanced coreset that is replayed in epochs: every sample once, in random order, before any sample again.

    The last draw of an epoch gets the samples that are left, which may be few. A new epoch also begins when a task
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
    _epoch: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # positions left to draw, in order

    def pick(self, size: int, count: int) -> NDArray[np.int64]:
        """Return the next positions of the epoch, or the first of a new one."""
        if not len(self._epoch):
            self._epoch = self.generator.permutation(size)
        picked, self._epoch = self._epoch[:count], self._epoch[count:]
        return picked

    def draw_state(self) -> Any:
        """Return the state that drawing changes: the generator's state and the rest of the epoch."""
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
