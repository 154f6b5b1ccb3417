"""The gradients of all batches of a step as one CUDA graph, for classifiers with linear heads."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from spcl.cuda_graphs.capture import MOST_GRAPHS, GraphCapture
from spcl.cuda_graphs.classifiers import ClassifierGraphs
from spcl.cuda_graphs.joint_classifier import JointGradient
from spcl.cuda_graphs.static_samples import Coefficients, StaticSamples
from spcl.cuda_graphs.steady_layouts import SteadyLayouts
from spcl.engine.gradients import GradientMatrix
from spcl.engine.joining import JoiningRule
from spcl.engine.joint_pass import JointBatch
from spcl.engine.model import SharedModel
from spcl.engine.segmented_functions import linear
from spcl.engine.segmented_mode import SegmentedMode
from spcl.engine.segments import SegmentGradients, Segments
from spcl.engine.snapshot import BufferSnapshot, total_norm

__all__ = ["OnePassGraphs"]


class OnePassGraphs:
    """One pass over the batches of all tasks and of memory as a graph for every list of batch sizes.

    Which tasks they are does not matter, as :class:`StaticSamples` says.
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

    def run(self, batches: Sequence[JointBatch]) -> StaticSamples | None:
        """Compute the gradients of batches of one kind; return None, having done nothing, where they have no graph."""
        samples = [group for batch in batches for group in batch.samples]
        if self._capture.unsupported is not None or len(batches) < 2:
            return None
        self._classifiers.joint_classifier()  # first: it may reallocate the heads, which changes the key
        targets = [self._gradients.plan.target(batch.gradient) for batch in batches]
        sizes = tuple(batch.size for batch in batches)
        segments = Segments.of(sizes, tuple(row for row, _ in targets))
        is_steady = self._layouts.is_steady(segments, self._gradients.plan.is_weighted)
        if not is_steady or self.rule.decide([batch.samples for batch in batches]) != "segments":
            return None
        x = cast(Tensor, samples[0].x)
        coefficients = tuple([self._classifiers.coefficients(batch.draw) for batch in batches])
        key = self._key(segments, batches, coefficients, x)
        if key not in self._passes:
            own = self._classifiers.static_samples(x, sizes, coefficients)
            self._passes[key] = self._new_pass(segments, [batch.gradient for batch in batches], own)
        static = self._passes[key]
        static.samples.fill([cast(Tensor, group.x) for group in samples], samples)
        if self._gradients.plan.is_weighted:
            static.scale([coefficient for _, coefficient in targets])
        static.run(self._capture)
        self._gradients.mark_filled(segments.rows)
        self._classifiers.note_trained(samples)
        return static.samples

    def _key(
        self, segments: Segments, batches: Sequence[JointBatch], coefficients: tuple[Coefficients, ...], x: Tensor
    ) -> tuple[object, ...]:
        gradients, plan = self._gradients, self._gradients.plan
        places = tuple(batch.gradient for batch in batches)
        matrix = gradients.length, gradients.buffer.data_ptr(), gradients.health.data_ptr(), self._classifiers.gradient
        kind = self._capture.key(segments.samples, x)
        return (segments, places, coefficients, plan.is_separate, plan.is_weighted, *matrix, *kind)

    def _new_pass(self, segments: Segments, places: Sequence[int], samples: StaticSamples) -> "_StaticPass":
        if len(self._passes) >= 2 * MOST_GRAPHS:
            del self._passes[next(iter(self._passes))]
        assert self._classifiers.gradient is not None
        of_heads = self._classifiers.gradient
        return _StaticPass(self._model, self._gradients, self.rule, segments, places, samples, of_heads)


class _StaticPass:
    """The tensors that the graph of one layout reads and writes, and the work on them."""

    def __init__(
        self,
        model: SharedModel,
        gradients: GradientMatrix,
        rule: JoiningRule,
        segments: Segments,
        places: Sequence[int],
        samples: StaticSamples,
        gradient: JointGradient,
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._rule = rule
        self._segments = segments
        self._joint = samples.joint
        self.samples = samples
        self._gradient = gradient
        self._weighs_heads = gradient.weighs_heads
        device, count = gradients.device, segments.samples
        sizes = torch.tensor(segments.sizes, device=device)
        place = torch.tensor(places, device=device)
        self._place = place.repeat_interleave(sizes, output_size=count)
        self._sizes = sizes
        dtype = torch.promote_types(gradients.dtype, torch.float32)
        self._coefficients = torch.ones(count, 1, dtype=dtype, device=device) if gradients.plan.is_weighted else None
        self._health = gradients.health[: max(places) + 1]
        self._buffers = [buffer for buffer in model.backbone.buffers() if buffer.is_floating_point()]
        self._replay: Callable[[], None] | None = None
        self._is_warm = False

    def scale(self, coefficients: Sequence[float]) -> None:
        """Set the coefficient of every batch's gradient, which that of its head has not unless it is weighed."""
        assert self._coefficients is not None
        each = torch.tensor(coefficients, dtype=torch.float64).to(self._coefficients, non_blocking=True)
        self._coefficients.copy_(each.repeat_interleave(self._sizes, output_size=len(self._place)).unsqueeze(1))

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
        target = SegmentGradients(self._gradients, self._segments, fresh=True)
        mode = SegmentedMode(self._segments, target, self._rule.names, self._rule.counters, self._rule.is_known)
        with self._model.precision():
            features = mode.run(self._model.backbone, self.samples.x)
            top = features if self._weighs_heads else features.detach().requires_grad_()
            logits = self._logits(top, target)
        losses = self.samples.losses(logits.float() if logits.dtype == self._model.autocast else logits)
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
