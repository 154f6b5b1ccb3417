"""Augmentation of a step's inputs as a CUDA graph."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spcl.batches import Inputs, sample_kind
from spcl.cuda_graphs.cache import GraphCache
from spcl.cuda_graphs.capture import MOST_GRAPHS, GraphCapture
from spcl.engine.model import SharedModel
from spcl.transforms import Transform

__all__ = ["AugmentationGraphs"]


class AugmentationGraphs:
    """Augments the inputs of all tasks from one static tensor to another.

    Only transforms with an attribute ``capturable`` that is true are captured: one that decides on the host, for
    example by Python's random numbers, would decide the same for ever.
    """

    def __init__(self, model: SharedModel) -> None:
        self._device = model.device
        self._cache = GraphCache(GraphCapture(model))
        self._static: dict[object, tuple[Tensor, Tensor]] = {}
        self._transform: Transform | None = None
        self._turn = 0

    def begin(self) -> None:
        """Start a step: results of the calls before may be overwritten."""
        self._turn = 0

    def supports(self, transform: Transform, inputs: Sequence[Inputs]) -> bool:
        """Return whether the transform can be captured, and the inputs are tensors of one kind on the device."""
        tensors = [x for x in inputs if isinstance(x, Tensor) and x.device == self._device]
        one_kind = len(tensors) == len(inputs) and len({sample_kind(x) for x in inputs}) == 1
        return one_kind and getattr(transform, "capturable", False) is True

    def run(self, transform: Transform, inputs: Sequence[Tensor]) -> list[Inputs]:
        """Return the augmented inputs, which stay until the next step."""
        sizes = [len(x) for x in inputs]
        if transform is not self._transform:
            self._transform = transform
            self._clear()
        key = sum(sizes), inputs[0].shape[1:], inputs[0].dtype, self._turn
        self._turn += 1
        source, result = self._buffers(key, inputs)
        torch.cat(list(inputs), out=source)

        def work() -> None:
            result.copy_(transform(source))

        self._cache.run(key, work)
        return list(result.split(sizes))  # type: ignore[no-untyped-call]

    def _buffers(self, key: object, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the static tensors of a key; all are dropped, with their graphs, once there are many."""
        if key not in self._static:
            if len(self._static) == MOST_GRAPHS:
                self._clear()
            whole = inputs[0].new_empty((sum(len(x) for x in inputs), *inputs[0].shape[1:]))
            self._static[key] = whole, torch.empty_like(whole)
        return self._static[key]

    def _clear(self) -> None:
        self._static.clear()
        self._cache.clear()
