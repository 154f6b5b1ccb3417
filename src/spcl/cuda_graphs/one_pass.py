"""The gradients of all batches of a step as one CUDA graph, for classifiers with linear heads."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from spcl.cuda_graphs.capture import MOST_GRAPHS, GraphCapture
from spcl.cuda_graphs.classifiers import ClassifierGraphs
from spcl.cuda_graphs.joint_classifier import JointClassifier, JointGradient
from spcl.cuda_graphs.steady_layouts import SteadyLayouts
from spcl.engine.gradients import GradientMatrix
from spcl.engine.joining import JoiningRule
from spcl.engine.joint_pass import JointBatch
from spcl.engine.model import Samples, SharedModel
from spcl.engine.segmented_functions import linear
from spcl.engine.segmented_mode import SegmentedMode
from spcl.engine.segments import SegmentGradients, Segments
from spcl.engine.snapshot import BufferSnapshot, total_norm

__all__ = ["OnePassGraphs"]


class OnePassGraphs:
    """One pass over the batches of all tasks and of memory as a graph for every list of batch sizes.

    Which tasks they are does not matter: every sample carries its label and the range of classes of its softmax.
    """

    def __init__(
        self,
        model: SharedModel,
        gradients: GradientMatrix,
        capture: GraphCapture,
        classifiers: ClassifierGraphs,
        snapshot: BufferSnapshot,
        layouts: SteadyLayouts,
    ) -> None:
        self._layouts = layouts
        self._model = model
        self._gradients = gradients
        self._capture = capture
        self._classifiers = classifiers
        self._passes: dict[object, _StaticPass] = {}
        self.rule = JoiningRule(model, gradients.parameters, snapshot)

    def run(self, batches: Sequence[JointBatch]) -> bool:
        """Compute the gradients of batches of one kind; return False, having done nothing, where they have no graph."""
        samples = [group for batch in batches for group in batch.samples]
        if self._capture.unsupported is not None or len(batches) < 2:
            return False
        self._classifiers.joint_classifier()  # first: it may reallocate the heads, which changes the key
        targets = [self._gradients.plan.target(batch.gradient) for batch in batches]
        sizes = tuple(batch.size for batch in batches)
        segments = Segments.of(sizes, tuple(row for row, _ in targets))
        key = self._key(segments, batches, cast(Tensor, samples[0].x))
        is_steady = self._layouts.is_steady(segments, self._gradients.plan.is_weighted)
        if not is_steady or self.rule.decide([batch.samples for batch in batches]) != "segments":
            return False
        static = self._pass(key, segments, batches, samples)
        static.fill([cast(Tensor, group.x) for group in samples], self._classifiers.classes_of(samples))
        if self._gradients.plan.is_weighted:
            static.scale([coefficient for _, coefficient in targets])
        static.run(self._capture)
        self._gradients.mark_filled(segments.rows)
        self._classifiers.note_trained(samples)
        return True

    def _key(self, segments: Segments, batches: Sequence[JointBatch], x: Tensor) -> tuple[object, ...]:
        gradients, plan = self._gradients, self._gradients.plan
        places = tuple(batch.gradient for batch in batches)
        matrix = gradients.length, gradients.buffer.data_ptr(), gradients.health.data_ptr(), self._classifiers.gradient
        kind = self._capture.key(segments.samples, x)
        return (segments, places, plan.is_separate, plan.is_weighted, *matrix, *kind)

    def _pass(
        self, key: object, segments: Segments, batches: Sequence[JointBatch], samples: Sequence[Samples]
    ) -> "_StaticPass":
        if key not in self._passes:
            if len(self._passes) >= 2 * MOST_GRAPHS:
                del self._passes[next(iter(self._passes))]
            assert self._classifiers.gradient is not None
            places = [batch.gradient for batch in batches]
            self._passes[key] = _StaticPass(
                self._model, self._gradients, self.rule, segments, places, cast(Tensor, samples[0].x),
                self._classifiers.joint_classifier(), self._classifiers.gradient,
            )  # fmt: skip
        return self._passes[key]


class _StaticPass:
    """The tensors that the graph of one layout reads and writes, and the work on them."""

    def __init__(
        self,
        model: SharedModel,
        gradients: GradientMatrix,
        rule: JoiningRule,
        segments: Segments,
        places: Sequence[int],
        x: Tensor,
        joint: JointClassifier,
        gradient: JointGradient,
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._rule = rule
        self._segments = segments
        self._joint = joint
        self._gradient = gradient
        self._weighs_heads = gradient.weighs_heads
        device, count = gradients.device, segments.samples
        sizes = torch.tensor(segments.sizes, device=device)
        self._x = torch.empty((count, *x.shape[1:]), dtype=x.dtype, device=device)
        self._classes = torch.zeros(2, count, dtype=torch.int64, device=device)
        place = torch.tensor(places, device=device)
        self._place = place.repeat_interleave(sizes, output_size=count)
        self._sizes = sizes
        self._share = (1.0 / sizes).repeat_interleave(sizes, output_size=count)
        self._coefficients = self._share.new_ones(count, 1) if gradients.plan.is_weighted else None
        self._health = gradients.health[: max(places) + 1]
        self._buffers = [buffer for buffer in model.backbone.buffers() if buffer.is_floating_point()]
        self._replay: Callable[[], None] | None = None
        self._is_warm = False

    def fill(self, inputs: Sequence[Tensor], classes: Tensor) -> None:
        """Copy the next batches into the static tensors."""
        torch.cat([part.to(self._x.device, non_blocking=True) for part in inputs], out=self._x)
        self._classes.copy_(classes, non_blocking=True)

    def scale(self, coefficients: Sequence[float]) -> None:
        """Set the coefficient of every batch's gradient, which that of its head has not unless it is weighed."""
        assert self._coefficients is not None
        each = torch.tensor(coefficients).to(self._share, non_blocking=True)
        self._coefficients.copy_(each.repeat_interleave(self._sizes, output_size=len(self._share)).unsqueeze(1))

    def run(self, capture: GraphCapture) -> None:
        """Replay the graph, which is captured at the second time; the first time is a warm-up."""
        if self._replay is None and self._is_warm:
            (self._replay,) = capture.capture([self.work]) or (None,)
        if self._replay is None:
            capture.warm_up(self.work)
        else:
            self._replay()
        self._is_warm = True

    def work(self) -> None:
        """Compute the gradients and their health."""
        labels, first = self._classes
        target = SegmentGradients(self._gradients, self._segments, fresh=True)
        mode = SegmentedMode(self._segments, target, self._rule.names, self._rule.counters)
        with self._model.precision():
            features = mode.run(self._model.backbone, self._x)
            top = features if self._weighs_heads else features.detach().requires_grad_()
            logits = self._logits(top, target)
        logits = logits.float() if logits.dtype == self._model.autocast else logits
        losses = cross_entropy(self._joint.within(logits, first), labels, reduction="none") * self._share
        if self._weighs_heads:
            torch.autograd.backward(self._scaled(losses.unsqueeze(1)).sum())
        else:
            of_features, *of_heads = torch.autograd.grad(losses.sum(), [top, self._joint.weight, self._joint.bias])
            torch.autograd.backward(features, self._scaled(of_features))
            self._gradient.add_to_heads(of_heads)
        target.finish()
        self._note_health(losses.detach())

    def _logits(self, features: Tensor, target: SegmentGradients) -> Tensor:
        """Return the logits; heads that are weighed have a gradient per segment, as any layer."""
        if self._weighs_heads:
            return linear(features, self._joint.weight, self._joint.bias, target)
        return self._joint.logits(features)

    def _scaled(self, values: Tensor) -> Tensor:
        return values if self._coefficients is None else values * self._coefficients.to(values.dtype)

    def _note_health(self, losses: Tensor) -> None:
        health, parts = self._health, [] if self._weighs_heads else [self._gradient.heads]
        if not self._gradients.plan.is_separate:
            parts.append(self._gradients.rows)
        health.zero_()
        health[:, 0].index_add_(0, self._place, losses.to(health.dtype))
        like = losses.sum()
        health[:, 1] = total_norm(parts, like)
        health[:, 2] = total_norm(self._buffers, like)
