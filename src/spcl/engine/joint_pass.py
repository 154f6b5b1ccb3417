"""One pass over several batches."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spcl.batches import Inputs, concatenate
from spcl.engine.classifier_stack import ClassifierStack
from spcl.engine.gradients import GradientMatrix
from spcl.engine.joining import JoiningRule
from spcl.engine.model import Samples, SharedModel
from spcl.engine.segmented_mode import SegmentedMode
from spcl.engine.segments import SegmentGradients, Segments
from spcl.engine.trial import check_unused
from spcl.methods.base import Method, Output

__all__ = ["JointBatch", "JointPass"]


@dataclass(frozen=True, eq=False)
class JointBatch:
    """A batch that shares a pass with others.

    Attributes:
        gradient: the index of its gradient in the step.
        samples: one task's, or those of a replay batch, by task.
        draw: which replay batch it is, or None for a task's own batch.
    """

    gradient: int
    samples: Sequence[Samples]
    draw: int | None = None

    @cached_property
    def size(self) -> int:
        """The number of samples."""
        return sum([group.y.shape[0] for group in self.samples])

    @property
    def share(self) -> float:
        """The part of a batch that it is, where ranks split batches."""
        return self.samples[0].share

    def loss(self, method: Method, outputs: Sequence[Output]) -> Tensor:
        """Return the method's loss on the batch."""
        return method.task_loss(outputs[0]) if self.draw is None else method.memory_loss(outputs, self.draw)


class JointPass:
    """A forward and a backward pass over several batches, whose gradients go to the rows that the plan says.

    Gradients that share a row are added by autograd. Gradients of several rows are computed by segments of the batch.
    A coefficient of a gradient scales the gradient of the features, so that heads are trained without it.

    Attributes:
        losses: of the batches, once there was a forward pass.
        logits: of the batches, likewise.
    """

    losses: Tensor
    logits: Iterable[Tensor]

    def __init__(
        self, model: SharedModel, gradients: GradientMatrix, rule: JoiningRule, batches: Sequence[JointBatch]
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._rule = rule
        self._batches = batches
        self._targets = [gradients.plan.target(batch.gradient) for batch in batches]
        self._rows = sorted({row for row, _ in self._targets})
        self._by_segments: list[SegmentGradients] = []
        self._stack: ClassifierStack | None = None
        self._own_features: Tensor
        self._is_fresh = True

    def forward(self, method: Method) -> None:
        """Compute the method's losses."""
        self._compute_losses(method)
        shares = [batch.share for batch in self._batches]
        if set(shares) != {1.0}:
            self.losses = self.losses * self.losses.new_tensor(shares)

    def _compute_losses(self, method: Method) -> None:
        layouts = self._layouts()
        own = [batch.samples[0] for batch in self._batches if batch.draw is None]
        is_plain = len(layouts) == 1 and not self._model.has_joint_logits and method.has_plain_task_loss()
        if is_plain and ClassifierStack.supports(own):
            self._stack = ClassifierStack(own, self._model.device, self._model.head_gradients)
            self._stacked_losses(method, self._stack, *layouts[0])
            return
        each = iter(layouts)
        samples = [group for batch in self._batches for group in batch.samples]
        outputs = iter(self._model.outputs(samples, backbone=lambda x: self._features(x, *next(each))))
        by_batch = [[next(outputs) for _ in batch.samples] for batch in self._batches]
        losses = [batch.loss(method, some) for batch, some in zip(self._batches, by_batch, strict=True)]
        self.losses, self.logits = torch.stack(losses), [some[0].value.detach() for some in by_batch]

    def _stacked_losses(
        self, method: Method, stack: ClassifierStack, segments: Segments, coefficients: list[float]
    ) -> None:
        """Compute the losses of many plain classifiers, and of memory if it takes part."""
        inputs = [self._model.on_device(group.x) for batch in self._batches for group in batch.samples]
        with self._model.precision():
            features = self._features(concatenate(inputs), segments, coefficients)
            rest = segments.samples - stack.samples
            own, *replayed = torch.split_with_sizes(features, [stack.samples, rest]) if rest else [features]
            self.losses = stack.forward(own)
        self.logits, self._own_features = stack.logits, own
        if replayed:
            others = self._batches[len(stack) :]
            samples = [group for batch in others for group in batch.samples]
            with self._model.precision():
                outputs = iter(self._model.head_outputs(samples, *replayed))
            losses = [batch.loss(method, [next(outputs) for _ in batch.samples]) for batch in others]
            self.losses = torch.cat([self.losses, torch.stack(losses)])

    def backward(self) -> None:
        """Compute the gradients of the losses."""
        if self._by_segments:
            for parameter in self._gradients.parameters:
                parameter.grad = None
            if not self._is_fresh:
                self._gradients.clear(self._rows)
        else:
            self._gradients.open(self._rows[0])
        self._differentiate_losses()
        if self._by_segments:
            check_unused(self._rule.names)
            for target in self._by_segments:
                target.finish()
            self._gradients.mark_filled(self._rows)

    def _differentiate_losses(self) -> None:
        roots: list[tuple[Tensor, Tensor | None]] = []
        if self.losses.requires_grad:
            roots.append((self.losses.sum(), None))
        if self._stack is not None:
            gradient = self._stack.backward([batch.share for batch in self._batches[: len(self._stack)]])
            if self._own_features.requires_grad:
                roots.append((self._own_features, gradient))
        if roots:
            tensors, gradients = zip(*roots, strict=True)
            torch.autograd.backward(tensors, gradients)
        if self._stack is not None:
            self._stack.assign_grads()

    def head_gradients(self) -> list[Tensor]:
        """Return the gradients of the heads, of many together where they were computed so."""
        if self._stack is not None and len(self.losses) == len(self._stack):
            return self._stack.gradients
        return [parameter.grad for parameter in self._model.head_parameters() if parameter.grad is not None]

    def _features(self, x: Inputs, segments: Segments, coefficients: Sequence[float]) -> Tensor:
        features = self._backbone_features(x, segments)
        if set(coefficients) == {1.0} or not features.requires_grad:
            return features
        factors = torch.tensor(coefficients, dtype=features.dtype).repeat_interleave(torch.tensor(segments.sizes))
        return _ScaledGradient.apply(features, factors.to(features.device, non_blocking=True))  # type: ignore[no-any-return, no-untyped-call]

    def _backbone_features(self, x: Inputs, segments: Segments) -> Tensor:
        target = None
        if len(self._rows) > 1 and self._gradients.parameters:
            target = SegmentGradients(self._gradients, segments, fresh=self._is_fresh)
            self._by_segments.append(target)
        if target is None and not self._rule.has_batch_norm:
            return self._model.backbone(x)  # type: ignore[no-any-return]
        mode = SegmentedMode(segments, target, self._rule.names, self._rule.counters, self._rule.is_known)
        return mode.run(self._model.backbone, x)

    def _layouts(self) -> list[tuple[Segments, list[float]]]:
        """Return, for every kind of sample in the order of appearance, sizes, rows and coefficients of the batches."""
        kinds: dict[Hashable, dict[int, int]] = {}
        for place, batch in enumerate(self._batches):
            for group in batch.samples:
                sizes = kinds.setdefault(group.kind, {})
                sizes[place] = sizes.get(place, 0) + group.y.shape[0]
        layouts = []
        for sizes in kinds.values():
            rows, coefficients = zip(*(self._targets[place] for place in sizes), strict=True)
            layouts.append((Segments.of(tuple(sizes.values()), rows), list(coefficients)))
        self._is_fresh = len(layouts) == 1
        return layouts


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, factors: Tensor) -> Tensor:
        ctx.factors = factors
        return features.view_as(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factors.view(-1, *[1] * (gradient.ndim - 1)), None
