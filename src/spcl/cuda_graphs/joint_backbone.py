"""The backbone's passes over all batches of a step as two CUDA graphs, below heads and losses of any kind."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from spcl.batches import Inputs, sample_kind
from spcl.cuda_graphs.capture import MOST_GRAPHS, GraphCapture
from spcl.cuda_graphs.steady_layouts import SteadyLayouts
from spcl.engine.gradients import GradientMatrix
from spcl.engine.joining import JoiningRule
from spcl.engine.joint_pass import JointBatch, JointPass
from spcl.engine.model import SharedModel
from spcl.engine.one_pass import OnePass
from spcl.engine.segmented_mode import SegmentedMode
from spcl.engine.segments import SegmentGradients, Segments
from spcl.engine.snapshot import BufferSnapshot
from spcl.engine.trial import Joining
from spcl.methods.base import Method

__all__ = ["GraphedOnePass"]


class GraphedOnePass(OnePass):
    """One pass over the batches of tasks and memory, once their sizes are steady; the heads run eagerly."""

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        gradients: GradientMatrix,
        snapshot: BufferSnapshot,
        capture: GraphCapture,
        layouts: SteadyLayouts,
    ) -> None:
        super().__init__(model, method, gradients, snapshot)
        self._capture = capture
        self._layouts = layouts
        self._passes_by_key: dict[object, _StaticPass] = {}

    @override
    def backward(self, batches: Sequence[JointBatch]) -> list[Tensor] | None:
        samples = [group for batch in batches for group in batch.samples]
        of_one_kind = len({sample_kind(group.x) for group in samples}) == 1
        is_tensor = of_one_kind and isinstance(samples[0].x, Tensor)
        if not is_tensor or len(batches) < 2 or self._capture.unsupported is not None:
            return None
        sizes = tuple(sum(len(group.y) for group in batch.samples) for batch in batches)
        targets = tuple(self._gradients.plan.target(batch.gradient)[0] for batch in batches)
        if not self._layouts.is_steady(Segments.of(sizes, targets), self._gradients.plan.is_weighted):
            return None
        return super().backward(batches)

    @override
    def _passes(self, batches: Sequence[JointBatch], joining: Joining) -> list[list[JointBatch]]:
        return [list(batches)] if joining == "segments" and self._gradients.parameters else []

    @override
    def _make_pass(self, batches: Sequence[JointBatch]) -> JointPass:
        return _GraphedPass(self._model, self._gradients, self.rule, batches, self._static_pass)

    def _static_pass(self, x: Tensor, segments: Segments) -> "_StaticPass":
        key = segments, self._gradients.buffer.data_ptr(), *self._capture.key(len(x), x)
        if key not in self._passes_by_key:
            if len(self._passes_by_key) == MOST_GRAPHS:
                del self._passes_by_key[next(iter(self._passes_by_key))]
            self._passes_by_key[key] = _StaticPass(self._model, self._gradients, self.rule, segments, self._capture, x)
        return self._passes_by_key[key]


class _GraphedPass(JointPass):
    """A pass over several batches whose part below the heads is that of a static pass."""

    def __init__(
        self,
        model: SharedModel,
        gradients: GradientMatrix,
        rule: JoiningRule,
        batches: Sequence[JointBatch],
        static_pass: Callable[[Tensor, Segments], "_StaticPass"],
    ) -> None:
        super().__init__(model, gradients, rule, batches)
        self._static_pass = static_pass

    @override
    def _backbone_features(self, x: Inputs, segments: Segments) -> Tensor:
        assert isinstance(x, Tensor)
        static, tracked = self._static_pass(x, segments), torch.ones((), device=x.device, requires_grad=True)
        features: Tensor = _BackboneFunction.apply(tracked, static, x)  # type: ignore[no-untyped-call]
        self._by_segments.append(static.target)
        return features


class _StaticPass:
    """The static tensors of a forward and a backward pass over several batches; the second time they become graphs."""

    target: SegmentGradients

    def __init__(
        self,
        model: SharedModel,
        gradients: GradientMatrix,
        rule: JoiningRule,
        segments: Segments,
        capture: GraphCapture,
        x: Tensor,
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._rule = rule
        self._segments = segments
        self._capture = capture
        self._x = torch.empty_like(x)
        self._features: Tensor | None = None
        self._feature_gradient: Tensor | None = None
        self._replays: list[Callable[[], None]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self._x.copy_(x, non_blocking=True)
        if self._replays is None and self._feature_gradient is not None:
            self._replays = self._capture.capture([self._forward_work, self._backward_work])
        if self._replays is None:
            self._capture.warm_up(self._forward_work)
        else:
            self._replays[0]()
        assert self._features is not None
        return self._features.detach()

    def backward(self, gradient: Tensor) -> None:
        if self._feature_gradient is None:
            self._feature_gradient = torch.empty_like(gradient)
        self._feature_gradient.copy_(gradient)
        if self._replays is None:
            self._capture.warm_up(self._backward_work)
        else:
            self._replays[1]()

    def _forward_work(self) -> None:
        self._features = None
        self.target = SegmentGradients(self._gradients, self._segments, fresh=True)
        mode = SegmentedMode(self._segments, self.target, self._rule.names, self._rule.counters)
        with torch.enable_grad(), self._model.precision():
            self._features = mode.run(self._model.backbone, self._x)

    def _backward_work(self) -> None:
        assert self._features is not None
        torch.autograd.backward(self._features, self._feature_gradient)
        self._features = self._features.detach()  # the graph of autograd is not needed any more


class _BackboneFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _tracked: Tensor, static: _StaticPass, x: Tensor) -> Tensor:
        ctx.static = static
        return static.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.static.backward(gradient)
        return None, None, None
