"""Class-balanced coresets of the finished sources: the memory of the paper, and the memory in its authors' code."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs
from spcl.errors import CheckpointError, SpclError
from spcl.memory.base import MEMORIES, Memory, SourceBuffer

Share = Literal["class", "source", "both"]
"""What has equal shares of the budget: every class of a task, every source, or every class of every source."""


@MEMORIES.register("balanced")
class BalancedCoreset(Memory):
    """A class-balanced random coreset of the finished sources (the paper's replay memory).

    Nothing can be drawn until the first source finishes. Then the ``C`` classes of the finished sources share the
    budget equally: ``⌊budget/C⌋`` samples each, and one more for the first ``budget mod C`` classes in the order in
    which sources started. Whenever a source finishes, the shares shrink and random samples of every class are evicted.
    A class with fewer samples than its share leaves the rest of its share unused.

    While a source runs, a uniform sample of each of its classes is kept as candidates, as many as the source would get
    if it finished now. Logits are computed by the ``model`` given to :meth:`finish`.

    Args:
        budget, seed, device, dtype: as of every :class:`Memory`.
        share: what has equal shares of the budget where several sources answer one task: every ``"class"`` of a task,
            whose samples may come from any source; every ``"source"``; or ``"both"``, every class of every source.

    >>> import torch
    >>> memory = BalancedCoreset(10, seed=0)
    >>> for source, classes in ("digits", 2), ("letters", 3):
    ...     memory.start(source, classes)
    ...     memory.observe(source, torch.rand(60, 4), torch.arange(60) % classes)
    >>> memory.draw(4), len(memory)
    ([], 0)
    >>> memory.finish("letters")
    >>> memory.counts()
    {'letters': [4, 3, 3]}
    >>> memory.finish("digits")
    >>> memory.counts()
    {'digits': [2, 2], 'letters': [2, 2, 2]}
    >>> [(batch.source, tuple(batch.x.shape)) for batch in memory.draw(32)]
    [('digits', (4, 4)), ('letters', (6, 4))]
    """

    draws_ahead = True
    replays_running = False
    keeps_observed_logits = False  # they would be outdated when the source ends

    def __init__(
        self,
        budget: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        share: Share = "class",
    ) -> None:
        super().__init__(budget, seed=seed, device=device, dtype=dtype)
        if share not in get_args(Share):
            raise SpclError(f"share is {share!r}; choose one of {', '.join(get_args(Share))}")
        self.share = share
        self._shared_by: object = None  # the budget and the claims on it at the last call of `choose`

    def choose(self) -> dict[str, NDArray[np.bool_]]:
        """Keep the lowest ranks of whatever has a share, up to its share."""
        ended = {name: buffer for name, buffer in self.buffers.items() if not buffer.running}
        places: dict[object, int] = {}
        firsts: dict[str, int] = {}  # the number of shares of ended sources before each source
        for name, buffer in self.buffers.items():
            firsts[name] = len(places)
            if name in ended:
                for claim in self._claims(name, buffer):
                    places.setdefault(claim, len(places))
        has_changed = self._shared_by != (shared_by := (self.budget, tuple(places), tuple(ended)))
        self._shared_by = shared_by
        kept = self._chosen_of_ended(ended, places) if has_changed else {}
        for name, buffer in self.buffers.items():
            if buffer.running and (has_changed or len(buffer.ranks) > buffer.size):
                claims = self._claims(name, buffer)
                new = [claim for claim in claims if claim not in places]
                positions = dict(zip(new, range(firsts[name], firsts[name] + len(new)), strict=True)) | places
                shares = self._sizes([positions[claim] for claim in claims], len(places) + len(new))
                kept[name] = _lowest(buffer.ranks, self._claim_of_samples(buffer), shares)
        return kept

    def _claims(self, source: str, buffer: SourceBuffer) -> list[object]:
        """Return the claims on the budget that a source brings: what gets a share."""
        if self.share == "source":
            return [source]
        owner = (buffer.task,) if self.share == "class" else (source, buffer.task)
        return [(*owner, label) for label in range(buffer.classes)]

    def _claim_of_samples(self, buffer: SourceBuffer) -> NDArray[np.int64]:
        """Return the index of the claim that each sample belongs to."""
        return buffer.labels if self.share != "source" else np.zeros_like(buffer.labels)

    def _sizes(self, positions: Sequence[int], total: int) -> NDArray[np.int64]:
        """Return the sizes of the shares at these positions, if the budget has `total` shares."""
        return self.budget // total + (np.array(positions) < self.budget % total)

    def _chosen_of_ended(
        self, ended: Mapping[str, SourceBuffer], places: Mapping[object, int]
    ) -> dict[str, NDArray[np.bool_]]:
        """Return the samples of ended sources to keep; sources of one task compete for the shares of its classes."""
        if not ended:
            return {}
        owners = [
            np.array([places[claim] for claim in self._claims(name, buffer)])[self._claim_of_samples(buffer)]
            for name, buffer in ended.items()
        ]
        ranks = np.concatenate([buffer.ranks for buffer in ended.values()])
        mask = _lowest(ranks, np.concatenate(owners), self._sizes(range(len(places)), len(places)))
        parts = np.split(mask, np.cumsum([len(buffer.ranks) for buffer in ended.values()])[:-1])
        return dict(zip(ended, parts, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; the samples are copies."""
        return super().state_dict() | ({} if self.share == "class" else {"share": self.share})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`; shares are as they were saved."""
        share = state.get("share", "class")
        if share not in get_args(Share):
            raise CheckpointError(f"memory has shares by {share!r:.80}; use another checkpoint")
        super().load_state_dict(state)
        self.share = share
        self._shared_by = None

    def finish(self, source: str, model: Callable[[Inputs], Tensor] | None = None) -> None:
        """Make the samples of ``source`` replayable, with the logits that ``model`` gives for them.

        If the model raises, for example out of memory, the source keeps running and can be finished again.
        """
        super().finish(source)
        if model is not None:
            try:
                self.buffers[source].store_logits(model)
            except BaseException:
                self.buffers[source].running = True
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

    The last draw of an epoch gets the samples that are left, which may be few. A new epoch also begins when a source
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

    def start(self, source: str, classes: int | None, task: str | None = None) -> None:
        """Start to keep samples of a source; one that returns is not replayed while it runs, so an epoch begins."""
        super().start(source, classes, task)
        self._epoch = self._epoch[:0] if source in self.buffers and self.buffers[source].size else self._epoch

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

    def finish(self, source: str, model: Callable[[Inputs], Tensor] | None = None) -> None:
        """Make the samples of ``source`` replayable, and begin a new epoch."""
        self.check_finish(source)
        self._cancel_draws()
        self._epoch = self._epoch[:0]
        super().finish(source, model)

    def resize(self, budget: int) -> None:
        """Keep at most ``budget`` samples of finished sources from now on, and begin a new epoch."""
        super().resize(budget)
        self._epoch = self._epoch[:0]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; the samples are copies."""
        return {**super().state_dict(), "epoch": self._epoch.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        super().load_state_dict(state)
        self._epoch = np.array(state["epoch"], dtype=np.int64)
