"""The backbone's passes as CUDA graphs, below heads and losses of any kind."""

from typing import Any

import torch
from torch import Tensor

from spcl.batches import Inputs
from spcl.cuda_graphs.capture import MOST_GRAPHS, GraphCapture
from spcl.engine.gradients import GradientMatrix, write_gradients
from spcl.engine.model import SharedModel

__all__ = ["BackboneGraphs"]


class BackboneGraphs:
    """The backbone's forward and backward pass as two CUDA graphs per batch size.

    Between the two the heads run eagerly. The gradient of the parameters is added to the open row of the gradient
    matrix. Inputs that are not a tensor run eagerly.
    """

    def __init__(self, model: SharedModel, gradients: GradientMatrix, capture: GraphCapture) -> None:
        self._model = model
        self._gradients = gradients
        self._capture = capture
        self._length = gradients.length  # before heads have columns, too
        self._seen: set[tuple[object, ...]] = set()
        self._passes: dict[tuple[object, ...], _StaticPass] = {}

    def __call__(self, x: Inputs) -> Tensor:
        """Return the features; a backward pass from them reaches the gradient matrix."""
        static = self._static_pass(x) if isinstance(x, Tensor) else None
        if static is None:
            return self._model.backbone(x)  # type: ignore[no-any-return]
        return _BackboneFunction.apply(self._gradients.buffer.new_ones((), requires_grad=True), static, x)  # type: ignore[no-any-return, no-untyped-call]

    def _static_pass(self, x: Tensor) -> "_StaticPass | None":
        """Return the graphs for these inputs; None in evaluation mode, and for the first batch of a size."""
        if x.requires_grad or not self._model.backbone.training or not torch.is_grad_enabled():
            return None
        key = self._capture.key(len(x), x)
        if key not in self._passes:
            is_new = key not in self._seen
            self._seen.add(key)
            if is_new or self._capture.unsupported is not None or len(self._passes) == MOST_GRAPHS:
                return None
            self._passes[key] = _StaticPass(self._model, self._gradients, self._length, self._capture, x)
        return self._passes[key]


class _StaticPass:
    """The static tensors of one forward and one backward pass of the backbone, and their graphs."""

    def __init__(
        self, model: SharedModel, gradients: GradientMatrix, length: int, capture: GraphCapture, x: Tensor
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._x = x.to(model.device, copy=True)
        self._gradient = torch.zeros(length, dtype=gradients.dtype, device=model.device)
        self._views = gradients.views(self._gradient)
        self._parameters = gradients.parameters[: len(self._views)]
        self._features: Tensor | None = None
        self._feature_gradient: Tensor | None = None
        works = [self._forward_work, self._backward_work]
        self._replays = capture.capture(works if self._parameters else works[:1])
        if self._replays is not None and self._features is not None:
            self._features = self._features.detach()  # else eager passes would share autograd's record of streams

    def forward(self, x: Tensor) -> Tensor:
        self._x.copy_(x, non_blocking=True)
        (self._forward_work if self._replays is None else self._replays[0])()
        assert self._features is not None
        return self._features.detach()

    def backward(self, gradient: Tensor) -> None:
        if not self._parameters:
            return
        assert self._feature_gradient is not None
        self._feature_gradient.copy_(gradient)
        (self._backward_work if self._replays is None else self._replays[1])()
        self._gradients.open_row[: len(self._gradient)].add_(self._gradient)

    def _forward_work(self) -> None:
        self._features = None
        with torch.enable_grad(), self._model.precision():
            self._features = self._model.backbone(self._x)
        if self._feature_gradient is None:
            self._feature_gradient = torch.zeros_like(self._features, requires_grad=False)

    def _backward_work(self) -> None:
        assert self._features is not None
        if not self._features.requires_grad:  # frozen but for parameters that the features do not depend on
            self._gradient.zero_()
            return
        gradients = torch.autograd.grad(self._features, self._parameters, self._feature_gradient, allow_unused=True)
        write_gradients(self._views, gradients)


class _BackboneFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _tracked: Tensor, static: _StaticPass, x: Tensor) -> Tensor:
        ctx.static = static
        return static.forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.static.backward(gradient)
        return None, None, None
