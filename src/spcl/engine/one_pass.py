"""The gradients of all batches of a step from as few passes as the network allows."""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from spcl.engine.gradients import GradientMatrix
from spcl.engine.joining import JoiningRule
from spcl.engine.joint_pass import JointBatch, JointPass
from spcl.engine.model import SharedModel
from spcl.engine.snapshot import BufferSnapshot, total_norm
from spcl.engine.trial import Joining
from spcl.methods.base import Method

__all__ = ["OnePass"]


class OnePass:
    """Computes the gradients of tasks and memory by as few passes as the network allows.

    Where the network's layers are known (linear, convolution, embedding, normalisation, parameters broadcast over
    samples), one pass gives all gradients, each in its row. Where they are not, but samples do not depend on each
    other, a pass gives the sum of those that share a row. Else there is nothing to gain.

    Attributes:
        rule: decides which batches share a pass.
    """

    def __init__(self, model: SharedModel, method: Method, gradients: GradientMatrix, snapshot: BufferSnapshot) -> None:
        self._model = model
        self._method = method
        self._gradients = gradients
        self._snapshot = snapshot
        self.rule = JoiningRule(model, gradients.parameters, snapshot)

    def backward(self, batches: Sequence[JointBatch]) -> Iterable[Tensor] | None:
        """Compute the gradients of the batches' losses and note their health; return the logits of each batch.

        Return None, having done nothing, where every batch needs a pass of its own.
        """
        joining = self.rule.decide([batch.samples for batch in batches]) if len(batches) > 1 else None
        passes = [] if joining is None else self._passes(batches, joining)
        if not passes or len(passes) == len(batches):
            return None
        done = []
        for together in passes:
            joint = self._make_pass(together)
            joint.forward(self._method)
            joint.backward()
            done.append(joint)
        heads = [gradient for joint in done for gradient in joint.head_gradients()]
        losses = done[0].losses.detach() if len(done) == 1 else torch.cat([joint.losses.detach() for joint in done])
        self._note_health([batch for part in passes for batch in part], losses, heads)
        return chain.from_iterable(joint.logits for joint in done)

    def _make_pass(self, batches: Sequence[JointBatch]) -> JointPass:
        return JointPass(self._model, self._gradients, self.rule, batches)

    def _passes(self, batches: Sequence[JointBatch], joining: Joining) -> list[list[JointBatch]]:
        if joining == "segments":
            return [list(batches)]
        rows: dict[int, list[JointBatch]] = {}
        for batch in batches:
            rows.setdefault(self._gradients.plan.target(batch.gradient)[0], []).append(batch)
        return list(rows.values())

    def _note_health(self, batches: Sequence[JointBatch], losses: Tensor, heads: Sequence[Tensor]) -> None:
        """Note every loss beside the norms of all gradients: which of them is not finite, separate passes show."""
        parts = [*heads]
        if not self._gradients.plan.is_separate:  # else the Gramian holds the norm of the shared part
            last = max(self._gradients.plan.target(batch.gradient)[0] for batch in batches)
            parts.append(self._gradients.rows[: last + 1])
        own = sum(batch.draw is None for batch in batches)
        if len(batches) > own + 1:  # memory's loss is the sum over its batches
            losses = torch.cat([losses[:own], losses[own:].sum(dim=0, keepdim=True)])
        health, buffers = self._gradients.health[: len(losses)], self._snapshot.norm()
        if losses.is_cpu:  # a few numbers, for which tensors take longer
            norm = sum(map(float, torch._foreach_norm(parts))) if parts else 0.0
            rows = health.numpy()
            rows[:, 0], rows[:, 1:] = losses.tolist(), (norm, float(buffers))
        else:
            norms = (norm.expand_as(losses) for norm in (total_norm(parts, losses[0]), buffers))
            health.copy_(torch.stack([losses, *norms], dim=1))
