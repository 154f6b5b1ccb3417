"""The gradients of all batches of a step as one CUDA graph, for classifiers with linear heads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from spcl.engine.graphs.capture import MOST_GRAPHS, GraphCapture, RepeatedWork
from spcl.engine.graphs.classifiers import ClassifierGraphs, Coefficients, JointGradient, StaticSamples
from spcl.engine.joining import JoiningRule
from spcl.engine.layers import linear
from spcl.engine.model import BufferSnapshot, SharedModel, StepBatch, total_norm
from spcl.engine.rows import GradientMatrix
from spcl.engine.segments import SegmentGradients, Segments

STEADY_STEPS = 6
"""After this many steps with the same batch sizes, the batches share a graph."""

MOST_LAYOUTS = 1000
"""The most layouts to count; beyond this number counting starts again."""


class SteadyLayouts:
    """Counts the steps in which batches had the same sizes and gradients the same rows.

    >>> layouts, segments = SteadyLayouts(), Segments((8, 8), (0, 1))
    >>> for _ in range(6):
    ...     assert not layouts.is_steady(segments, weighted=False)
    ...     layouts.count(segments, weighted=False)
    >>> layouts.is_steady(segments, weighted=False)
    True
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[tuple[int, ...], tuple[int, ...], bool]] = Counter()

    def is_steady(self, segments: Segments, weighted: bool) -> bool:
        """Return whether enough steps had this layout; ``weighted`` says whether gradients had coefficients."""
        return self._counts[segments.sizes, segments.targets, weighted] >= STEADY_STEPS

    def count(self, segments: Segments, weighted: bool) -> None:
        """Count a step with this layout."""
        if len(self._counts) > MOST_LAYOUTS:
            self._counts.clear()
        layout = segments.sizes, segments.targets, weighted
        self._counts[layout] = min(self._counts[layout] + 1, STEADY_STEPS)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain data: a resumed run joins batches in the same steps."""
        layouts = [[list(sizes), list(rows), weighted, n] for (sizes, rows, weighted), n in self._counts.items()]
        return {"layouts": layouts} if layouts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        self._counts.clear()
        for sizes, rows, weighted, count in state.get("layouts", []):
            self._counts[tuple(sizes), tuple(rows), weighted] = count


class OnePassGraphs:
    """One pass over the batches of all tasks and of memory, with a CUDA graph for every list of batch sizes.

    A graph serves any tasks, see :class:`~spcl.engine.graphs.classifiers.StaticSamples`.

    Attributes:
        rule: decides which batches share a pass.
        reason: why the latest batches could not all share one pass; None if they could.
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
        self._passes: dict[object, StaticPass] = {}
        self.rule = JoiningRule(model, gradients.parameters, snapshot)
        self.reason: str | None = None

    def find(self, batches: Sequence[StepBatch]) -> "StaticPass | None":
        """Return the pass over these batches; None if each batch needs its own.

        Batches whose sizes still change take separate passes, too, because capturing a graph takes time.
        """
        if self._capture.unsupported is not None or len(batches) < 2:
            return None
        self._classifiers.joint_classifier()  # first: it may reallocate the heads, which changes the key
        sizes = tuple(batch.size for batch in batches)
        segments = Segments.of(sizes, tuple(self._gradients.plan.targets[batch.gradient].row for batch in batches))
        if not self._layouts.is_steady(segments, self._gradients.plan.is_weighted):
            return None
        joining, self.reason = self.rule.decide([batch.samples for batch in batches])
        if joining != "segments":
            return None
        x = cast(Tensor, batches[0].samples[0].x)
        coefficients = tuple([self._classifiers.coefficients(batch.draw) for batch in batches])
        key = self._key(segments, batches, coefficients, x)
        if key not in self._passes:
            if len(self._passes) >= 2 * MOST_GRAPHS:
                del self._passes[next(iter(self._passes))]
            assert self._classifiers.gradient is not None
            self._passes[key] = StaticPass(
                model=self._model,
                gradients=self._gradients,
                rule=self.rule,
                segments=segments,
                places=[batch.gradient for batch in batches],
                samples=self._classifiers.static_samples(x, sizes, coefficients),
                gradient=self._classifiers.gradient,
                capture=self._capture,
            )
        return self._passes[key]

    def run(self, static: "StaticPass", batches: Sequence[StepBatch]) -> None:
        """Compute the gradients of batches by the pass that :meth:`find` returned for them."""
        samples = [group for batch in batches for group in batch.samples]
        static.samples.fill([cast(Tensor, group.x) for group in samples], samples)
        if self._gradients.plan.is_weighted:
            static.scale([self._gradients.plan.targets[batch.gradient].coefficient for batch in batches])
        static.graph.run(static.work)
        self._gradients.mark_filled(static.segments.rows)
        self._classifiers.note_trained(samples)

    def _key(
        self, segments: Segments, batches: Sequence[StepBatch], coefficients: tuple[Coefficients, ...], x: Tensor
    ) -> tuple[object, ...]:
        gradients, plan = self._gradients, self._gradients.plan
        places = tuple(batch.gradient for batch in batches)
        matrix = gradients.length, gradients.buffer.data_ptr(), gradients.health.data_ptr(), self._classifiers.gradient
        kind = self._capture.key(segments.samples, x)
        return (segments, places, coefficients, plan.is_separate, plan.is_weighted, *matrix, *kind)


class StaticPass:
    """The pass over batches of certain sizes, on static tensors, which a graph reads and writes.

    Attributes:
        segments: the segments of the joint batch.
        samples: the samples of all batches.
        graph: runs :meth:`work`.
    """

    def __init__(
        self,
        model: SharedModel,
        gradients: GradientMatrix,
        rule: JoiningRule,
        segments: Segments,
        places: Sequence[int],
        samples: StaticSamples,
        gradient: JointGradient,
        capture: GraphCapture,
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._rule = rule
        self.segments = segments
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
        self.graph = RepeatedWork(capture)

    def scale(self, coefficients: Sequence[float]) -> None:
        """Set the coefficient of every batch's gradient; it applies to gradients of heads only if heads are weighed."""
        assert self._coefficients is not None
        each = torch.tensor(coefficients, dtype=torch.float64).to(self._coefficients, non_blocking=True)
        self._coefficients.copy_(each.repeat_interleave(self._sizes, output_size=len(self._place)).unsqueeze(1))

    def work(self) -> None:
        """Compute the gradients and their health."""
        target = SegmentGradients(self._gradients, self.segments, fresh=True)
        with self._model.precision():
            features = self._rule.mode(self.segments, target).run(self._model.backbone, self.samples.x)
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
        """Return the logits; weighed heads have one gradient per segment, like any layer."""
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
