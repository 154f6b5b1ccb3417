"""Engine that computes large batches in parts, whose gradients add up: gradient accumulation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from spcl.batches import map_leaves
from spcl.engine.base import Passes
from spcl.engine.eager import EagerEngine
from spcl.engine.model import Samples, SharedModel, StepBatch
from spcl.engine.ranks.shares import MeanCheck
from spcl.methods.base import MEMORY, Method
from spcl.transforms import Transform


class MicroBatchEngine(EagerEngine):
    r"""Computes what :class:`~spcl.engine.eager.EagerEngine` computes, in passes over at most ``micro_batch`` samples.

    A loss that is a mean over samples is the weighted mean over parts: :math:`\ell(B) = \sum_j \frac{|B_j|}{|B|}
    \ell(B_j)`. Batch-norm normalises every part by the part's own statistics, and dropout draws anew for every part.

    Args:
        model: the shared model.
        method: how gradients become an update.
        micro_batch: the largest number of samples in a pass. Steps without a larger batch are computed as usual.
    """

    def __init__(self, model: SharedModel, method: Method, micro_batch: int) -> None:
        super().__init__(model, method)
        self._micro_batch = micro_batch
        self._means = MeanCheck(model, "micro_batch", "leave micro_batch out")
        self._logits: dict[str, list[Tensor]] = {}
        self._begun: set[int] = set()

    @override
    def backward(self, batches: Sequence[StepBatch], transform: Transform | None, *, apart: bool = False) -> Passes:
        if all(batch.size <= self._micro_batch for batch in batches):
            return super().backward(batches, transform, apart=apart)
        if transform is not None:
            batches = self.augmented(batches, transform, replays_too=True)
        for batch in batches:
            self._check_loss(batch)
        self._logits.clear()
        self._begun = {batch.gradient for batch in batches if batch.draw}  # earlier draws have begun the gradient
        passes = self._backward_apart([part for batch in batches for part in self._parts(batch)], None)
        self._begun.clear()
        return passes._replace(logits={name: torch.cat(self._logits[name]) for name in passes.logits})

    def _check_loss(self, batch: StepBatch) -> None:
        if batch.size > self._micro_batch:
            name = batch.samples[0].name if batch.draw is None else MEMORY
            self._means.check(name, batch.draw or 0, batch.samples, lambda outputs: batch.loss(self.method, outputs))

    def _parts(self, batch: StepBatch) -> Iterator[StepBatch]:
        """Split a batch into the fewest parts, of almost equal sizes; batch-norm cannot train on a single sample."""
        edges = np.linspace(0, batch.size, -(-batch.size // self._micro_batch) + 1).round().astype(int).tolist()
        for first, last in pairwise(edges):
            yield replace(batch, samples=_between(batch.samples, first, last, (last - first) / batch.size))

    @override
    def _backward_task(self, index: int, samples: Samples) -> Tensor | None:
        logits = super()._backward_task(index, samples)
        if logits is not None and self.method.stores_logits:
            self._logits.setdefault(samples.name, []).append(logits)
        return logits

    @override
    def _note_health(self, index: int, health: Tensor, add: bool) -> None:
        super()._note_health(index, health, add or index in self._begun)
        self._begun.add(index)


def _between(samples: Sequence[Samples], first: int, last: int, share: float) -> list[Samples]:
    """Return the samples from ``first`` to before ``last``, whose loss counts with the factor ``share``."""
    parts, start = [], 0
    for group in samples:
        rows = slice(max(first - start, 0), min(last - start, len(group.y)))
        if rows.start < rows.stop:
            x, stored = map_leaves(lambda leaf: leaf[rows], group.x), group.stored  # noqa: B023 (it is called at once)
            stored = None if stored is None else stored[rows]
            parts.append(replace(group, x=x, y=group.y[rows], stored=stored, share=share))
        start += len(group.y)
    return parts
