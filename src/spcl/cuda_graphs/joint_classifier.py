"""The linear heads of all classifiers in one matrix, and the gradient of a batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from spcl.engine.gradients import GradientMatrix, write_gradients
from spcl.engine.model import Samples
from spcl.methods.base import Task

__all__ = ["JointClassifier", "JointGradient"]

FIRST_CAPACITY = 128


class JointClassifier:
    """One matrix of which the linear heads of all classifiers are slices, so that one graph serves every task.

    A head keeps its own parameters: only their storage moves into the matrix. Its capacity doubles when it is full.

    Args:
        features: their number.
        class_incremental: whether samples are told apart from the classes of all tasks.
        offsets: returns what the loss of new samples adds to their logits, or None.
        like: a tensor on the device and of the type of the weights.
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
        """Move the heads of new tasks into the matrix; return whether the matrix was allocated anew."""
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
        self.weight, self.bias, self.capacity = (
            weight,
            bias,
            capacity,
        )  # last: an out-of-memory error keeps the old matrix

    def _move_in(self, task: Task) -> None:
        own = own_classes(task)
        assert isinstance(task.head, nn.Linear)
        for part, whole in ((task.head.weight, self.weight), (task.head.bias, self.bias)):
            whole.data[own].copy_(part.data)
            part.data = whole.data[own]
        self._outside[0 if self._class_incremental else task.offset, own] = 0.0

    def ranges_of(self, samples: Sequence[Samples]) -> list[int]:
        """Return for every batch what identifies the classes that its softmax covers.

        It is the first of them, or the capacity for new samples whose loss has offsets.
        """
        offsets = self._offsets()
        if offsets is not None and offsets is not self._written:
            self._outside[self.capacity, : len(offsets)] = offsets
            self._written = offsets
        has_offsets = [offsets is not None and not group.replayed for group in samples]
        firsts = [0 if self._class_incremental else group.task.offset for group in samples]
        return [self.capacity if flag else first for flag, first in zip(has_offsets, firsts, strict=True)]

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of every class there is room for."""
        return linear(features, self.weight, self.bias)

    def within(self, logits: Tensor, ranges: Tensor) -> Tensor:
        """Return the logits, with offsets, and −∞ outside the classes that each sample's range identifies."""
        return logits + self._outside.index_select(0, ranges)


class JointGradient:
    """The gradient of a batch: that of the shared parameters is overwritten, those of the heads are accumulated.

    Heads that are weighed with the backbone are a part of every batch's gradient: theirs are overwritten, too.

    Attributes:
        whole: the shared parameters', then the matrix's, then the biases'.
        shared: the first part of it.
        heads: the rest.
        weighs_heads: whether heads are weighed.
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
        """Differentiate the loss."""
        *shared, weight, bias = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        write_gradients(self._shared_views, shared)
        if self.weighs_heads:
            write_gradients(self._head_views, [weight, bias])
        else:
            self.add_to_heads([weight, bias])

    def add_to_heads(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients of the matrix and of the biases."""
        torch._foreach_add_(self._head_views, list(gradients))

    def of_head(self, task: Task) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters of a task's head, each with its gradient."""
        assert task.head is not None
        own = own_classes(task)
        return list(zip(task.head.parameters(), (view[own] for view in self._head_views), strict=True))


def own_classes(task: Task) -> slice:
    """Return the task's own classes among all."""
    return slice(task.offset, task.offset + (task.classes or 0))
