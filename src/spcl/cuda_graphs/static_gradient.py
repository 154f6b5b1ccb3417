"""Gradient of one batch on static tensors, for capture."""

from collections.abc import Callable

import torch
from torch import Tensor

from spcl.cuda_graphs.joint_classifier import JointGradient
from spcl.cuda_graphs.static_samples import StaticSamples
from spcl.engine.model import SharedModel
from spcl.engine.snapshot import total_norm

__all__ = ["StaticGradient"]


class StaticGradient:
    """The tensors that a graph reads and writes, for batches of one size, and the work on them.

    Attributes:
        samples: the batch.
        gradient: the result.
        health: loss, norm of the gradient, norm of the backbone's buffers.
        replay: replays the work's graph, if there is one.
    """

    def __init__(self, model: SharedModel, samples: StaticSamples, gradient: JointGradient) -> None:
        self._model = model
        self.samples = samples
        self.gradient = gradient
        self._buffers = [buffer for buffer in model.backbone.buffers() if buffer.is_floating_point()]
        self.health = gradient.whole.new_zeros(3)
        self.replay: Callable[[], None] | None = None

    def work(self) -> None:
        """Compute gradient, health and logits eagerly."""
        loss = self._loss()
        self.gradient.write(loss)
        value = loss.detach()
        torch.stack([value, self.gradient.whole.norm(), total_norm(self._buffers, value)], out=self.health)

    def _loss(self) -> Tensor:
        with self._model.precision():
            logits = self.samples.joint.logits(self._model.backbone(self.samples.x))
        return self.samples.losses(logits.float() if logits.dtype == self._model.autocast else logits).sum()
