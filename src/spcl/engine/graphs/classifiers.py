"""Gradients of classifiers as CUDA graphs: forward pass, loss and backward pass of a batch in one graph.

The linear heads of all classifiers are slices of one matrix, and every sample names its own classes, so that one graph
serves all tasks, both scenarios and replay.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from spcl.batches import Inputs, sample_kind
from spcl.engine.graphs.capture import MOST_GRAPHS, GraphCapture
from spcl.engine.model import Samples, SharedModel, total_norm
from spcl.engine.rows import GradientMatrix, write_gradients
from spcl.methods.base import Method, squared_distances
from spcl.tasks import Task

FIRST_CAPACITY = 128


class JointClassifier:
    """One matrix whose slices are the linear heads of all classifiers.

    A head keeps its own parameters: only their storage moves into the matrix. The capacity doubles when it is full.

    Args:
        features: the number of features.
        class_incremental: whether a sample's softmax covers the classes of all tasks.
        offsets: returns the numbers that the loss of new samples adds to logits, or None.
        like: a tensor with the weights' type and device.
    """

    def __init__(
        self,
        features: int,
        class_incremental: bool,
        offsets: Callable[[], Tensor | None],
        like: Tensor,
    ) -> None:
        self._features = features
        self._class_incremental = class_incremental
        self._offsets = offsets
        self._like = like
        self._included: list[Task] = []
        self._written: Tensor | None = None
        self.capacity = 0

    def include(self, tasks: Sequence[Task]) -> bool:
        """Move the heads of new tasks into the matrix; return whether a larger matrix was allocated."""
        new = tasks[len(self._included) :]
        needed = sum(task.classes or 0 for task in tasks)
        grows = needed > self.capacity
        if grows:
            self._reserve(max(FIRST_CAPACITY, 1 << (needed - 1).bit_length()))
        for task in tasks if grows else new:
            self._move_in(task)
        self._included += new
        return grows

    def _reserve(self, capacity: int) -> None:
        weight = nn.Parameter(self._like.new_zeros(capacity, self._features))
        bias = nn.Parameter(self._like.new_zeros(capacity))
        self._outside = self._like.new_full((capacity + 1, capacity), float("-inf"))
        self._written = None
        # last, so that the old matrix stays if memory runs out
        self.weight, self.bias, self.capacity = weight, bias, capacity

    def _move_in(self, task: Task) -> None:
        own = own_classes(task)
        assert isinstance(task.head, nn.Linear)
        for part, whole in ((task.head.weight, self.weight), (task.head.bias, self.bias)):
            whole.data[own].copy_(part.data)
            part.data = whole.data[own]
        self._outside[0 if self._class_incremental else task.offset, own] = 0.0

    def ranges_of(self, samples: Sequence[Samples]) -> list[int]:
        """Return for every batch the range of classes that its softmax covers, for :meth:`within`.

        A range is identified by its first class; the range with offsets, for new samples, by the capacity.
        """
        offsets = self._offsets()
        if offsets is not None and offsets is not self._written:
            self._outside[self.capacity, : len(offsets)] = offsets
            self._written = offsets
        has_offsets = [offsets is not None and not group.replayed for group in samples]
        firsts = [0 if self._class_incremental else group.task.offset for group in samples]
        return [self.capacity if flag else first for flag, first in zip(has_offsets, firsts, strict=True)]

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of all rows of the matrix, also of rows without a class yet."""
        return linear(features, self.weight, self.bias)

    def within(self, logits: Tensor, ranges: Tensor) -> Tensor:
        """Return the logits, plus offsets inside each sample's range, and −∞ outside."""
        return logits + self._outside.index_select(0, ranges)


class JointGradient:
    """The gradient of a batch: every batch overwrites the shared parameters' part and adds to the heads' part.

    If heads are weighed with the backbone, every batch overwrites the heads' part, too.

    Attributes:
        whole: the gradient of shared parameters, matrix and biases, in this order.
        shared: the part of the shared parameters.
        heads: the part of matrix and biases.
        weighs_heads: whether heads are weighed with the backbone.
    """

    def __init__(self, joint: JointClassifier, gradients: GradientMatrix, weighs_heads: bool) -> None:
        self._parameters = [*gradients.shared, joint.weight, joint.bias]
        self.weighs_heads = weighs_heads
        size, length = joint.weight.numel(), gradients.shared_length
        self.whole = gradients.buffer.new_zeros(length + size + joint.capacity)
        self.shared, self.heads = self.whole[:length], self.whole[length:]
        self._shared_views = gradients.views(self.shared)
        self._head_views = [self.heads[:size].view_as(joint.weight), self.heads[size:]]

    def write(self, loss: Tensor) -> None:
        """Compute the gradient of the loss."""
        *shared, weight, bias = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        write_gradients(self._shared_views, shared)
        if self.weighs_heads:
            write_gradients(self._head_views, [weight, bias])
        else:
            self.add_to_heads([weight, bias])

    def add_to_heads(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients of matrix and biases."""
        torch._foreach_add_(self._head_views, list(gradients))

    def of_head(self, task: Task) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters of a task's head, each with its gradient."""
        assert task.head is not None
        own = own_classes(task)
        return list(zip(task.head.parameters(), (view[own] for view in self._head_views), strict=True))


def own_classes(task: Task) -> slice:
    """Return the slice of the task's own classes among the classes of all tasks."""
    return slice(task.offset, task.offset + (task.classes or 0))


Coefficients = tuple[float, float]
"""The coefficients of cross-entropy and of the squared distance to stored logits, in the loss of a batch."""


class StaticSamples:
    r"""The tensors of one or more batches that a graph reads, and the losses of their samples.

    A sample's softmax covers a range of classes (its task's classes, or all classes, perhaps with offsets); its stored
    logits begin at the first class of the range. In a batch of n samples the loss of a sample is
    :math:`\tfrac1n (a\, \ell + b\, d)` with cross-entropy :math:`\ell` and squared distance d to stored logits.

    Args:
        joint: the classifier of all classes.
        x: inputs of the same shape and type.
        sizes: the sizes of the batches.
        coefficients: the coefficients (a, b) of the batches.
        keeps_logits: whether to keep the logits, for memory to store.

    Attributes:
        joint: the classifier of all classes.
        x: the inputs.
        logits: the logits of all rows of the classifier, or None if they are not kept.
    """

    def __init__(
        self,
        joint: JointClassifier,
        x: Tensor,
        sizes: Sequence[int],
        coefficients: Sequence[Coefficients],
        keeps_logits: bool,
    ) -> None:
        like, count = joint.weight.detach(), sum(sizes)
        self.joint = joint
        self.x = torch.empty((count, *x.shape[1:]), dtype=x.dtype, device=like.device)
        self.logits = like.new_zeros(count, joint.capacity) if keeps_logits else None
        self._table = torch.zeros(3, count, dtype=torch.int64, device=like.device)
        repeats = torch.tensor(sizes)
        each = torch.tensor(coefficients, dtype=torch.promote_types(like.dtype, torch.float32)) / repeats.unsqueeze(1)
        self._of_label, self._of_distance = each.repeat_interleave(repeats, dim=0).T.contiguous().to(like.device)
        has_distances = any(of_logits for _, of_logits in coefficients)
        self._stored = like.new_zeros(count * joint.capacity) if has_distances else None
        self._columns = torch.arange(joint.capacity, device=like.device)

    def fill(self, inputs: Sequence[Tensor], samples: Sequence[Samples]) -> None:
        """Copy samples, with these inputs, into the static tensors."""
        if len(inputs) == 1:
            self.x.copy_(inputs[0], non_blocking=True)
        else:
            torch.cat([part.to(self.x.device, self.x.dtype, non_blocking=True) for part in inputs], out=self.x)
        self._table.copy_(torch.from_numpy(self._table_of(samples)), non_blocking=True)
        parts = [group.stored for group in samples if group.stored is not None]
        if self._stored is not None and parts:
            stored = torch.cat([part.to(parts[0].device).flatten() for part in parts])
            self._stored[: len(stored)].copy_(stored, non_blocking=True)

    def losses(self, logits: Tensor) -> Tensor:
        """Return the loss of every sample; the sum over a batch is the loss of the batch."""
        if self.logits is not None:
            self.logits.copy_(logits.detach())
        labels, ranges, widths = self._table
        losses: Tensor = cross_entropy(self.joint.within(logits, ranges), labels, reduction="none") * self._of_label
        if self._stored is not None:
            stored = self._stored_logits(self._stored, ranges, widths)
            losses = losses + self._of_distance * squared_distances(logits, stored)
        return losses

    def _table_of(self, samples: Sequence[Samples]) -> NDArray[np.int64]:
        """Return every sample's label among all classes, range of classes, and number of stored logits."""
        sizes = [group.y.shape[0] for group in samples]
        widths = [0 if group.stored is None else group.stored.shape[1] for group in samples]
        tasks = [group.task for group in samples]
        groups = [[task.offset for task in tasks], self.joint.ranges_of(samples), widths]
        table = np.repeat(np.array(groups), sizes, axis=1)
        table[0] += np.concatenate([group.y.numpy(force=True) for group in samples])
        return table

    def _stored_logits(self, stored: Tensor, first: Tensor, widths: Tensor) -> Tensor:
        """Return stored logits, given sample after sample, at their classes; NaN at classes without a stored logit."""
        column = self._columns - first.unsqueeze(1)
        is_stored = (column >= 0) & (column < widths.unsqueeze(1))
        place = column + (widths.cumsum(0) - widths).unsqueeze(1)
        return torch.where(is_stored, stored.take(torch.where(is_stored, place, 0)), math.nan)


class StaticGradient:
    """The gradient of a batch of a certain size on static tensors, which a graph can read and write.

    Attributes:
        samples: the batch.
        gradient: the gradient, after :meth:`work`.
        health: loss, norm of the gradient and norm of the backbone's buffers, after :meth:`work`.
        replay: replays the graph of :meth:`work`; None if there is none.
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


class ClassifierGraphs:
    """The gradient of a batch, with a CUDA graph per batch size, for classifiers with linear heads.

    The first batch of a size runs eagerly, as a warm-up; on a device without CUDA graphs every batch does.

    Attributes:
        gradient: the shared parameters' gradient of the latest batch, and the heads' gradients of the step; None before
            the first batch.
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
        """Start a step: heads have no gradients yet."""
        self._trained = {}
        if self.gradient is not None:
            self.gradient.heads.zero_()

    def supports(self, samples: Sequence[Samples]) -> bool:
        """Return whether all samples are tensors with labels, for classifiers with plain cross-entropy."""
        return self._model.backbone.training and all(map(_is_plain, samples))

    def supports_together(self, samples: Sequence[Samples]) -> bool:
        """Return whether all samples are supported and have one shape and type, so that they can be one batch."""
        return self.supports(samples) and len({sample_kind(group.x) for group in samples}) == 1

    def coefficients(self, draw: int | None) -> Coefficients:
        """Return the coefficients of the loss on a replay batch, or on a task's batch, whose ``draw`` is None."""
        return (1.0, 0.0) if draw is None else self._method.replay.coefficients(draw)

    def run(
        self, index: int, samples: Sequence[Samples], inputs: Sequence[Inputs], draw: int | None = None
    ) -> StaticGradient:
        """Add the gradient of a batch to gradient ``index`` of the gradient matrix, and to the gradients of heads."""
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
        """Return copies of the first batches' logits by source: for its own classes, or for all classes."""
        if static.logits is None:
            return {}
        sizes = [len(samples.y) for samples in batches]
        copies = torch.split_with_sizes(static.logits[: sum(sizes)].clone(), sizes)
        classes = [own_classes(samples.task) for samples in batches]
        if self._model.scenario == "class":
            classes = [slice(sum(task.classes or 0 for task in self._model.classifiers))] * len(batches)
        return {group.name: copy[:, own] for group, copy, own in zip(batches, copies, classes, strict=True)}

    def head_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients of the heads trained in this step; the next step overwrites them.

        If heads are weighed with the backbone, their gradients are slices of the update.
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
        """Return the joint classifier with the heads of all tasks; when it grows, drop the graphs of the old one."""
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
        """Return static tensors for batches of these sizes with inputs like ``x``."""
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
    return (
        is_classifier
        and group.source.encoder is None
        and isinstance(group.x, Tensor)
        and not group.y.is_floating_point()
    )
