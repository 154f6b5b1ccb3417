"""Two backward passes over the batches of a step: for the Gramian of their gradients, and for their weighted sum."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from spcl.batches import Inputs
from spcl.engine.gradients import GradientMatrix
from spcl.engine.joining import JoiningRule
from spcl.engine.joint_pass import JointBatch, JointPass
from spcl.engine.layer_gramian import LayerGramian, SegmentGramian
from spcl.engine.model import SharedModel
from spcl.engine.one_pass import OnePass
from spcl.engine.segmented_mode import SegmentedMode
from spcl.engine.segments import Segments
from spcl.engine.snapshot import BufferSnapshot
from spcl.engine.trial import Joining, check_unused
from spcl.methods.base import Method

__all__ = ["RetainedPass", "TwoPasses"]

Array = NDArray[np.float64]


class RetainedPass(JointPass):
    """A forward pass over several batches, and two backward passes through the backbone, whose graph is kept.

    The first one gathers the Gramian of the batches' gradients. The second one starts from the gradient of the
    features, in which the samples of every batch are scaled by the batch's weight, and gives the weighted sum. Heads
    get their gradients in the first one alone.

    Args:
        model: the shared model.
        gradients: a gradient matrix with one row, and that of the orthogonality gradient if there is one.
        rule: by which the batches share the pass.
        batches: all of the step.

    Attributes:
        gramian: of the gradients, once there was a backward pass.
    """

    gramian: LayerGramian

    def __init__(
        self, model: SharedModel, gradients: GradientMatrix, rule: JoiningRule, batches: Sequence[JointBatch]
    ) -> None:
        super().__init__(model, gradients, rule, batches)
        self.gramian = LayerGramian(gradients)
        self._parts: list[tuple[Tensor, Tensor, Segments, SegmentGramian]] = []

    @override
    def _features(self, x: Inputs, segments: Segments, coefficients: Sequence[float]) -> Tensor:
        target = SegmentGramian(self._gradients, segments, self.gramian)
        mode = SegmentedMode(segments, target, self._rule.names, self._rule.counters, self._rule.is_known)
        features = mode.run(self._model.backbone, x)
        top = features.detach()
        if features.requires_grad:
            self._parts.append((features, top.requires_grad_(), segments, target))
        return top

    @override
    def backward(self) -> None:
        for parameter in self._gradients.parameters:
            parameter.grad = None
        self._differentiate_losses()
        self.losses = self.losses.detach()
        for features, top, _, _ in self._parts:
            if top.grad is not None:
                torch.autograd.backward(features, top.grad, retain_graph=True)
        self.gramian.finish()
        check_unused(self._rule.names)

    def combine(self, weights: Array) -> None:
        """Form the sum of the gradients, each times its weight, in row 0; afterwards the graph is freed."""
        self._gradients.hold(1)
        update = self._gradients.rows[0].zero_()
        while self._parts:
            features, top, segments, target = self._parts.pop()
            target.sum_up()
            if top.grad is not None:
                torch.autograd.backward(features, self._weighted(top.grad, segments, weights))
        if self._gradients.has_penalty:
            update.add_(self._gradients.penalty_row, alpha=float(weights[-1]))

    def _weighted(self, gradient: Tensor, segments: Segments, weights: Array) -> Tensor:
        """Return the gradient of the features, in which every sample is scaled by the weight of its batch."""
        by_batch = torch.from_numpy(weights[list(segments.targets)]).to(self._gradients.dtype)
        multiple = segments.multiple(gradient)
        factors = by_batch.repeat_interleave(multiple * torch.tensor(segments.sizes))
        factors = factors.to(gradient.device, non_blocking=True).view(-1, *[1] * (gradient.ndim - 1))
        return (gradient * factors).to(gradient.dtype)


class TwoPasses(OnePass):
    """Computes Gramian and weighted sum of the gradients of tasks and memory without holding them.

    Args:
        model: the shared model.
        method: whose losses are computed.
        gradients: the gradient matrix.
        snapshot: of the model's buffers.
        penalty: computes the orthogonality gradient, or None.

    Attributes:
        latest: the pass whose gradients have not been combined yet, or None.
    """

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        gradients: GradientMatrix,
        snapshot: BufferSnapshot,
        penalty: Callable[[], None] | None,
    ) -> None:
        super().__init__(model, method, gradients, snapshot)
        self.rule = JoiningRule(model, gradients.parameters, snapshot, for_speed=False)
        self._penalty = penalty
        self.latest: RetainedPass | None = None

    @override
    def _passes(self, batches: Sequence[JointBatch], joining: Joining) -> list[list[JointBatch]]:
        if joining != "segments" and not self._gradients.holds_rows:
            return []
        return super()._passes(batches, joining)

    @override
    def _make_pass(self, batches: Sequence[JointBatch]) -> JointPass:
        if self._gradients.holds_rows:
            return super()._make_pass(batches)
        if self._penalty is not None:
            self._penalty()
        self.latest = RetainedPass(self._model, self._gradients, self.rule, batches)
        return self.latest
