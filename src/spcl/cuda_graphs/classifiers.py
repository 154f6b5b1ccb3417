"""Gradients of classifiers as CUDA graphs: forward pass, loss and backward pass of a batch in one."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.batches import Inputs, sample_kind
from spcl.cuda_graphs.capture import MOST_GRAPHS, GraphCapture
from spcl.cuda_graphs.joint_classifier import JointClassifier, JointGradient, own_classes
from spcl.cuda_graphs.static_gradient import StaticGradient
from spcl.cuda_graphs.static_samples import Coefficients, StaticSamples
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples, SharedModel
from spcl.methods.base import Method, Task

__all__ = ["ClassifierGraphs"]


class ClassifierGraphs:
    """The gradient of a batch as one CUDA graph per batch size, for classifiers with linear heads.

    One graph serves all tasks, both scenarios and replay, as :class:`StaticSamples` says. It computes what the eager
    engine computes. The first batch of a size runs eagerly as a warm-up; on a device without graphs every batch does.

    Attributes:
        gradient: of the latest batch, and of all heads in this step; None before the first batch.
    """

    def __init__(self, model: SharedModel, gradients: GradientMatrix, capture: GraphCapture, method: Method) -> None:
        self._model = model
        self._gradients = gradients
        self._capture = capture
        self._method = method
        self._weighs_heads = method.settings.weigh_heads
        self._seen: set[tuple[object, ...]] = set()
        self._graphs: dict[tuple[object, ...], StaticGradient] = {}
        self._joint: JointClassifier | None = None
        self.gradient: JointGradient | None = None
        self._head_gradients: dict[Task, list[tuple[nn.Parameter, Tensor]]] = {}
        self._trained: dict[Task, None] = {}

    def begin(self) -> None:
        """Start a step: the heads have no gradient yet."""
        self._trained = {}
        if self.gradient is not None:
            self.gradient.heads.zero_()

    def supports(self, samples: Sequence[Samples]) -> bool:
        """Return whether all of these are tensors of classifiers trained by plain cross-entropy with labels."""
        return self._model.backbone.training and all(map(_is_plain, samples))

    def supports_together(self, samples: Sequence[Samples]) -> bool:
        """Return whether these are supported as one batch: all have one shape and type."""
        return self.supports(samples) and len({sample_kind(group.x) for group in samples}) == 1

    def coefficients(self, draw: int | None) -> Coefficients:
        """Return those of a replay batch, or of a task's own batch, whose ``draw`` is None."""
        return (1.0, 0.0) if draw is None else self._method.replay.coefficients(draw)

    def run(
        self, index: int, samples: Sequence[Samples], inputs: Sequence[Inputs], draw: int | None = None
    ) -> StaticGradient:
        """Add the gradient of a batch to the gradient matrix at ``index``, and to the heads' gradients."""
        static = self._static_gradient(samples, self.coefficients(draw))
        static.samples.fill(cast(Sequence[Tensor], inputs), samples)
        if static.replay is None:
            self._capture.warm_up(static.work)
        else:
            static.replay()
        self._gradients.add(index, static.gradient.whole if self._weighs_heads else static.gradient.shared)
        self.note_trained(samples)
        return static

    def logits(self, static: StaticSamples, batches: Sequence[Samples]) -> dict[str, Tensor]:
        """Return copies of the logits of the first batches, by task: those of the task, or of all classes."""
        if static.logits is None:
            return {}
        sizes = [len(samples.y) for samples in batches]
        copies = torch.split_with_sizes(static.logits[: sum(sizes)].clone(), sizes)
        classes = [own_classes(samples.task) for samples in batches]
        if self._model.scenario == "class":
            classes = [slice(sum(task.classes or 0 for task in self._model.classifiers))] * len(batches)
        return {group.task.name: copy[:, own] for group, copy, own in zip(batches, copies, classes, strict=True)}

    def head_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients of the heads trained in this step; the next step overwrites them.

        Heads that are weighed have theirs in the update, and are none of these where they cannot be captured.
        """
        if not self._weighs_heads:
            return [pair for task in self._trained for pair in self._head_gradients[task]]
        if (joint := self._joint) is None:
            return []
        return [
            (parameter, whole.grad[own_classes(task)])
            for task in self._model.classifiers
            for parameter, whole in zip(self._model.head(task).parameters(), (joint.weight, joint.bias), strict=True)
            if whole.grad is not None
        ]

    def note_trained(self, samples: Sequence[Samples]) -> None:
        """Note which heads have a gradient in this step."""
        classifiers = self._model.classifiers if self._model.scenario == "class" else [group.task for group in samples]
        self._trained |= dict.fromkeys(classifiers)

    def joint_classifier(self) -> JointClassifier:
        """Return the joint classifier with the heads of all tasks in it; graphs of a smaller one are dropped."""
        if self._joint is None:
            features, like = int(self._model.feature_dim or 0), self._gradients.buffer.new_empty(0)
            is_joint, offsets = self._model.scenario == "class", self._model.loss_offsets
            self._joint = JointClassifier(features, is_joint, offsets, like)
        classifiers = self._model.classifiers
        if self._joint.include(classifiers):
            self.gradient = None
            self._graphs.clear()
            self._head_gradients.clear()
        if self.gradient is None and classifiers:
            self.gradient = JointGradient(self._joint, self._gradients, self._weighs_heads)
        if self.gradient is not None:
            for task in classifiers[len(self._head_gradients) :]:
                self._head_gradients[task] = self.gradient.of_head(task)
        return self._joint

    def static_samples(self, x: Tensor, sizes: Sequence[int], coefficients: Sequence[Coefficients]) -> StaticSamples:
        """Return static tensors for batches of these sizes with inputs like these."""
        return StaticSamples(self.joint_classifier(), x, sizes, coefficients, self._method.stores_logits)

    def _static_gradient(self, samples: Sequence[Samples], coefficients: Coefficients) -> StaticGradient:
        self.joint_classifier()
        size = sum([len(group.y) for group in samples])
        x = cast(Tensor, samples[0].x)
        key = coefficients, *self._capture.key(size, x)
        static = self._graphs.get(key)
        if static is None:
            assert self.gradient is not None
            static = StaticGradient(self._model, self.static_samples(x, [size], [coefficients]), self.gradient)
            if key in self._seen and len(self._graphs) < MOST_GRAPHS:
                (static.replay,) = self._capture.capture([static.work]) or (None,)
                self._graphs[key] = static
            self._seen.add(key)
        return static


def _is_plain(group: Samples) -> bool:
    is_classifier = group.task.classes is not None and group.task.loss is cross_entropy
    return is_classifier and isinstance(group.x, Tensor) and not group.y.is_floating_point()
