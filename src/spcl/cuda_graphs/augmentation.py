"""Augmentation of a step's inputs as a CUDA graph."""

from collections.abc import Sequence
from functools import partial

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
        self._static: dict[object, _StaticInputs] = {}
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
        static = self._static_inputs(key, inputs[0].new_empty((sum(sizes), *inputs[0].shape[1:])))
        torch.cat(list(inputs), out=static.source)
        self._cache.run(key, partial(static.transform, transform))
        assert static.result is not None
        return list(static.result.split(sizes))  # type: ignore[no-untyped-call]

    def _static_inputs(self, key: object, source: Tensor) -> "_StaticInputs":
        """Return the static tensors of a key; all are dropped, with their graphs, once there are many."""
        if key not in self._static:
            if len(self._static) == MOST_GRAPHS:
                self._clear()
            self._static[key] = _StaticInputs(source)
        return self._static[key]

    def _clear(self) -> None:
        self._static.clear()
        self._cache.clear()


class _StaticInputs:
    """The inputs of a batch before and after a transform, which may change their type and shape."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.result: Tensor | None = None  # from the first run on, which is not captured

    def transform(self, transform: Transform) -> None:
        transformed = transform(self.source)
        if self.result is None:
            self.result = torch.empty_like(transformed)
        self.result.copy_(transformed)
