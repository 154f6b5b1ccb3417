"""The orthogonality gradient as a CUDA graph."""

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from spcl.cuda_graphs.capture import GraphCapture
from spcl.engine.eager import penalised_layers, penalty_factor
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import SharedModel
from spcl.methods.base import Method
from spcl.orthogonality import add_orthogonality_gradient
from spcl.precision import float32_products

__all__ = ["PenaltyGraph"]


class PenaltyGraph:
    """The orthogonality gradient (times α unless that is relative), computed while the host prepares batches.

    In mixed precision its products are TF32, as exact as the weights' bfloat16 copies are.

    Attributes:
        gradient: the result of the last :meth:`run`.
    """

    def __init__(self, model: SharedModel, gradients: GradientMatrix, capture: GraphCapture, method: Method) -> None:
        self._model = model
        self._alpha = penalty_factor(method)
        self._layers = penalised_layers(method)
        self._capture = capture
        self.gradient: Tensor = gradients.buffer.new_zeros(gradients.length)
        self._views = dict(zip(gradients.parameters, gradients.views(self.gradient), strict=True))
        self._has_run = False
        self._replay: Callable[[], None] | None = None

    def run(self) -> None:
        """Compute the gradient at the present weights."""
        if self._has_run and self._replay is None:
            (self._replay,) = self._capture.capture([self._work]) or (None,)
        if self._replay is None:
            self._capture.warm_up(self._work)
        else:
            self._replay()
        self._has_run = True

    def _work(self) -> None:
        self.gradient.zero_()
        with nullcontext() if self._model.autocast is None else float32_products("tf32"):
            add_orthogonality_gradient(self._model.backbone, self._views, self._alpha, self._layers)
