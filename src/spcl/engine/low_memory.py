"""Engine that holds no gradient matrix."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from spcl.engine.eager import EagerEngine
from spcl.engine.model import Samples, SharedModel
from spcl.engine.reduction import ReductionPlan
from spcl.engine.two_passes import TwoPasses
from spcl.methods.base import Method

__all__ = ["LowMemoryEngine"]

Array = NDArray[np.float64]


class LowMemoryEngine(EagerEngine):
    """Computes what :class:`~spcl.engine.eager.EagerEngine` computes, in the memory of plain training.

    All batches share a forward pass. A first backward pass gathers the Gramian of their gradients layer by layer, a
    second one gives the update, as the gradient of the weighted losses. The T×n gradient matrix is never held. A step
    that cannot share a pass holds it as usual; a warning says why.
    """

    def __init__(self, model: SharedModel, method: Method) -> None:
        super().__init__(model, method)
        is_penalised = method.settings.alpha > 0.0 and self.gradients.length > 0
        penalty = super().penalty_gradient if is_penalised else None
        self._two_passes = TwoPasses(model, method, self.gradients, self._snapshot, penalty)
        self.one_pass = self._two_passes
        self._has_warned = False

    @override
    def backward(self, batches: Sequence[Samples]) -> dict[str, Tensor]:
        if not self.gradients.holds_rows:
            self._warn()
            super()._hold_rows(self.gradients.plan)
        return super().backward(batches)

    @override
    def penalty_gradient(self) -> None:
        if self._two_passes.latest is None:  # else it was needed before
            super().penalty_gradient()

    @override
    def gramian(self, needed: bool) -> tuple[Array | None, Array]:
        latest = self._two_passes.latest
        if latest is None or not needed:
            return super().gramian(needed)
        products, health = latest.gramian.products, self.gradients.health[: len(self.gradients.plan.names)]
        values: Array = torch.cat([products.view(-1), health.view(-1)]).cpu().numpy()
        found = values[: products.numel()].reshape(products.shape)
        return found, values[products.numel() :].reshape(health.shape)

    @override
    def combine(self, weights: Array) -> None:
        if self._two_passes.latest is None:
            super().combine(weights)
        else:
            self._two_passes.latest.combine(weights)
            self._two_passes.latest = None

    @override
    def _hold_rows(self, plan: ReductionPlan) -> None:
        self._two_passes.latest = None  # with the graph of a step that was not finished
        if self.one_pass is None or not plan.is_separate or plan.rows < 2 or not self.gradients.length:
            super()._hold_rows(plan)
        else:
            penalty = self.method.settings.alpha > 0.0
            self.gradients.begin(plan, penalty=penalty, rows=int(penalty))  # the row of the update is not needed yet

    def _warn(self) -> None:
        if self.fallback_reason is not None and not self._has_warned:
            self._has_warned = True
            rows, gradients = self.gradients.plan.rows, self.gradients
            mebibytes = rows * gradients.length * gradients.dtype.itemsize / 2**20
            warnings.warn(
                f"low_memory is not possible here, so the {rows} gradients of a step are held ({mebibytes:,.0f} MiB): "
                f"{self.fallback_reason}",
                RuntimeWarning,
                stacklevel=7,
            )
