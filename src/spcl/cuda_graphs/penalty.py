"""The orthogonality gradient as a CUDA graph."""

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from spcl.cuda_graphs.graphs import Graphs
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import SharedModel
from spcl.orthogonality import add_orthogonality_gradient
from spcl.precision import float32_products

__all__ = ["CapturedPenalty"]


class CapturedPenalty:
    """α times the orthogonality gradient as a CUDA graph, on which the GPU works while the host prepares batches.

    In mixed precision its products are TF32, as exact as the weights' bfloat16 copies are.
    """

    def __init__(self, model: SharedModel, rows: GradientMatrix, graphs: Graphs, alpha: float) -> None:
        self._model = model
        self._alpha = alpha
        self._graphs = graphs
        self._views = dict(
            zip(rows.parameters, rows.views(gradient := rows.buffer.new_zeros(rows.length)), strict=True)
        )
        self.gradient: Tensor = gradient
        self._has_run = False
        self._replay: Callable[[], None] | None = None

    def run(self) -> None:
        """Leave the gradient at the present weights in :attr:`gradient`."""
        if self._has_run and self._replay is None:
            (self._replay,) = self._graphs.capture([self._work]) or (None,)
        if self._replay is None:
            self._graphs.rehearse(self._work)
        else:
            self._replay()
        self._has_run = True

    def _work(self) -> None:
        self.gradient.zero_()
        with nullcontext() if self._model.autocast is None else float32_products("tf32"):
            add_orthogonality_gradient(self._model.backbone, self._views, self._alpha)
