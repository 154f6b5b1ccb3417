"""The orthogonality gradient as a CUDA graph beside the columns."""

from collections.abc import Callable

import torch
from torch import Tensor

from spcl.learner.graphs import Graphs
from spcl.learner.model import SharedModel
from spcl.learner.rows import GradientRows
from spcl.orthogonality import add_orthogonality_gradient

__all__ = ["CapturedPenalty"]


class CapturedPenalty:
    """The orthogonality gradient as a CUDA graph that runs beside the tasks' columns: both only read the weights.

    In mixed precision its products are TF32, as exact as the weights' bfloat16 copies are.
    """

    def __init__(self, model: SharedModel, rows: GradientRows, graphs: Graphs) -> None:
        self._model = model
        self._graphs = graphs
        self._gradient = torch.zeros(rows.length, dtype=rows.dtype, device=rows.device)
        self._views = dict(zip(rows.parameters, rows.views(self._gradient), strict=True))
        self._side = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        self._has_run = False
        self._run: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin; what is launched from now on runs at the same time."""
        if self._has_run and self._run is None:
            (self._run,) = self._graphs.capture([self._work], beside_others=True)
        self._has_run = True
        self._side.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(self._side):
            (self._run or self._work)()

    def result(self) -> Tensor:
        """The gradient, for which whatever comes next on the GPU waits."""
        torch.cuda.current_stream(self._model.device).wait_stream(self._side)
        return self._gradient

    def _work(self) -> None:
        self._gradient.zero_()
        precision = torch.get_float32_matmul_precision()
        if self._model.autocast is not None:
            torch.set_float32_matmul_precision("high")
        try:
            add_orthogonality_gradient(self._model.backbone, self._views)
        finally:
            torch.set_float32_matmul_precision(precision)
