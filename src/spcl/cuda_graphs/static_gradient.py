"""Gradient of one batch on static tensors, for capture."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from spcl.cuda_graphs.joint_classifier import JointClassifier, JointGradient
from spcl.engine.model import SharedModel
from spcl.engine.snapshot import total_norm

__all__ = ["StaticGradient"]


class StaticGradient:
    """The tensors that a graph reads and writes, for batches of one size, and the work on them.

    Attributes:
        x: the inputs.
        classes: for every sample its label, and the first class that its softmax covers.
        gradient: the result.
        health: loss, norm of the gradient, norm of the backbone's buffers.
        logits: of every class there is room for, if they are stored.
        replay: replays the work's graph, if there is one.
    """

    def __init__(
        self,
        model: SharedModel,
        joint: JointClassifier,
        gradient: JointGradient,
        x: Tensor,
        classes: Tensor,
        stores_logits: bool,
    ) -> None:
        like, size = gradient.whole, classes.shape[1]
        self._model = model
        self._joint = joint
        self.gradient = gradient
        self._buffers = [buffer for buffer in model.backbone.buffers() if buffer.is_floating_point()]
        self.x = torch.empty((size, *x.shape[1:]), dtype=x.dtype, device=like.device)
        self.classes = classes
        self._one = like.new_ones(())
        self.health = like.new_zeros(3)
        self.logits = like.new_zeros(size, joint.capacity) if stores_logits else None
        self.replay: Callable[[], None] | None = None

    def fill(self, inputs: Sequence[Tensor], classes: Tensor) -> None:
        """Copy the next batch into the static tensors."""
        if len(inputs) == 1:
            self.x.copy_(inputs[0], non_blocking=True)
        else:
            torch.cat([part.to(self.x.device, self.x.dtype, non_blocking=True) for part in inputs], out=self.x)
        self.classes.copy_(classes, non_blocking=True)

    def work(self) -> None:
        """Compute gradient, health and logits eagerly."""
        loss = self._loss()
        self.gradient.write(loss, self._one)
        value = loss.detach()
        torch.stack([value, self.gradient.whole.norm(), total_norm(self._buffers, value)], out=self.health)

    def _loss(self) -> Tensor:
        labels, first = self.classes
        with self._model.precision():
            logits = self._joint.logits(self._model.backbone(self.x))
        logits = logits.float() if logits.dtype == self._model.autocast else logits
        if self.logits is not None:
            self.logits.copy_(logits.detach())
        return cross_entropy(self._joint.within(logits, first), labels)
