"""A column's whole work as one CUDA graph, for classifiers with linear heads."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from spcl.learner.graphs import MOST_SHAPES, Graphs
from spcl.learner.guard import size_of
from spcl.learner.model import Samples, SharedModel
from spcl.learner.rows import GradientRows, write_gradients
from spcl.learner.tasks import Task

__all__ = ["CapturedColumns", "StaticColumn"]

FIRST_CAPACITY = 128

SMALL = 1 << 20
"""Networks with fewer parameters are worked through faster than their graphs are launched one by one."""

STEADY = 16
"""How often the same tasks must be trained with batches of the same sizes before their columns get one graph."""


class JointClassifier:
    """One matrix of which the linear heads of all classifiers are slices, so that one graph serves every task.

    A head keeps its own parameters: only their storage moves into the matrix. Its capacity doubles when it is full.

    Attributes:
        gradient: of the shared parameters in the latest column, then those of the matrix and of the biases, which add
            up over the columns of a step.
    """

    def __init__(self, features: int, rows: GradientRows) -> None:
        self._features = features
        self._rows = rows
        self._adopted: list[Task] = []
        self._gradients: dict[Task, list[tuple[nn.Parameter, Tensor]]] = {}
        self.capacity = 0

    def adopt(self, tasks: Sequence[Task]) -> bool:
        """Take over the heads of tasks that are new; says whether the matrix has moved."""
        new = tasks[len(self._adopted) :]
        self._adopted += new
        needed = sum(task.classes or 0 for task in self._adopted)
        grows = needed > self.capacity
        if grows:
            self._reserve(max(FIRST_CAPACITY, 1 << (needed - 1).bit_length()))
        for task in self._adopted if grows else new:
            self._move_in(task)
        return grows

    def _reserve(self, capacity: int) -> None:
        rows, size = self._rows, capacity * self._features
        self.capacity = capacity
        self.weight = nn.Parameter(rows.buffer.new_zeros(capacity, self._features))
        self.bias = nn.Parameter(rows.buffer.new_zeros(capacity))
        self.gradient = rows.buffer.new_zeros(rows.length + size + capacity)
        self.shared, self.heads = self.gradient[: rows.length], self.gradient[rows.length :]
        self._weight_gradient, self._bias_gradient = self.heads[:size].view_as(self.weight), self.heads[size:]
        self._views = rows.views(self.gradient)

    def _move_in(self, task: Task) -> None:
        head, own = task.head, slice(task.offset, task.offset + (task.classes or 0))
        assert isinstance(head, nn.Linear)
        for part, whole in ((head.weight, self.weight), (head.bias, self.bias)):
            whole.data[own].copy_(part.data)
            part.data = whole.data[own]
        gradients = (self._weight_gradient[own], self._bias_gradient[own])
        self._gradients[task] = list(zip(head.parameters(), gradients, strict=True))

    def backward(self, loss: Tensor) -> None:
        """Write the loss's gradient by the shared parameters, and add those by the heads."""
        *shared, weight, bias = torch.autograd.grad(
            loss, [*self._rows.parameters, self.weight, self.bias], allow_unused=True
        )
        write_gradients(self._views, shared)
        self._weight_gradient.add_(weight)
        self._bias_gradient.add_(bias)

    def head_gradients(self, tasks: Sequence[Task]) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters of these tasks' heads, each with its gradient."""
        return [pair for task in tasks for pair in self._gradients[task]]


class CapturedColumns:
    """Forward, loss and backward of a batch as one CUDA graph per batch size, for classifiers with linear heads.

    Every sample carries the range of classes its softmax covers (its task's, or all that were added), so the graph
    knows neither tasks nor scenario: columns of tasks and of memory replay the same one. What it computes is what the
    eager engine computes. The first batch of a size, and on a device without graphs every batch, is worked on eagerly
    in the same way: a size that never returns is not worth a graph.
    """

    def __init__(self, model: SharedModel, rows: GradientRows, graphs: Graphs) -> None:
        self._model = model
        self._rows = rows
        self._graphs = graphs
        self._seen: set[tuple[object, ...]] = set()
        self._columns: dict[tuple[object, ...], StaticColumn] = {}
        self._joint: JointClassifier | None = None
        self._trained: dict[Task, None] = {}
        self._steps_alike = 0
        self._step_key: tuple[object, ...] = ()
        self._step: _StaticStep | None = None

    def begin(self) -> None:
        """A step begins: heads have no gradient yet."""
        self._trained = {}
        if self._joint is not None:
            self._joint.heads.zero_()

    def takes(self, samples: Sequence[Samples]) -> bool:
        """Whether all of these are classifiers, to be trained by cross-entropy."""
        plain = all(group.task.classes is not None and group.task.loss is cross_entropy for group in samples)
        return plain and self._model.backbone.training

    def replay(self, samples: Sequence[Samples], inputs: Sequence[Tensor], signs: Tensor) -> "StaticColumn":
        """Add the column's gradient to the row that was started, and to those of the heads; write its signs."""
        column = self._column(samples)
        column.fill(inputs, self._classes(samples))
        column.run()
        self._rows.add(column.joint.shared)
        signs.copy_(column.signs)
        self._note_trained(samples)
        return column

    def _note_trained(self, samples: Sequence[Samples]) -> None:
        classifiers = self._model.classifiers if self._model.scenario == "class" else [group.task for group in samples]
        self._trained |= dict.fromkeys(classifiers)

    def replay_step(self, samples: Sequence[Samples], signs: Tensor) -> bool:
        """The columns of all these tasks at once, each in its own row; False where there is no graph for that.

        There is one for a small network, once its steps have been alike for a while.
        """
        if self._rows.length >= SMALL or self._graphs.refused is not None:
            return False
        tasks = [(group.task, *self._graphs.key(len(group.x), group.x)) for group in samples]
        key = (*tasks, self._rows.buffer.data_ptr(), signs.data_ptr())
        if key != self._step_key:
            self._step_key, self._steps_alike, self._step = key, 0, None
        self._steps_alike += 1
        if self._steps_alike <= STEADY:
            return False
        if self._step is None:
            columns = [StaticColumn(self._model, self._adopting(), group.x, len(group.x)) for group in samples]
            self._step = _StaticStep(columns, self._rows, signs)
            (self._step.run,) = self._graphs.capture([self._step.work])
        for column, group in zip(self._step.columns, samples, strict=True):
            column.fill([group.x], self._classes([group]))
        self._step.run()
        self._note_trained(samples)
        return True

    def head_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What the heads got in this step; written over in the next one."""
        return [] if self._joint is None else self._joint.head_gradients(list(self._trained))

    def _column(self, samples: Sequence[Samples]) -> "StaticColumn":
        joint = self._adopting()
        size = sum([len(group.x) for group in samples])
        key = self._graphs.key(size, samples[0].x)
        column = self._columns.get(key)
        if column is None:
            column = StaticColumn(self._model, joint, samples[0].x, size)
            column.run = partial(self._graphs.rehearse, column.work)
            if key in self._seen and len(self._columns) < MOST_SHAPES:
                (column.run,) = self._graphs.capture([column.work])
                self._columns[key] = column
            self._seen.add(key)
        return column

    def _adopting(self) -> JointClassifier:
        """The joint classifier, with the heads of all tasks in it."""
        if self._joint is None:
            self._joint = JointClassifier(int(self._model.feature_dim or 0), self._rows)
        if self._joint.adopt(self._model.classifiers):
            self._columns.clear()
            self._step_key = ()
        return self._joint

    def _classes(self, samples: Sequence[Samples]) -> Tensor:
        """Label, first class and end of the classes of every sample, as indices into the joint logits."""
        table = np.empty((3, sum([len(group.x) for group in samples]), 1), dtype=np.int64)
        total = sum([task.classes or 0 for task in self._model.classifiers])
        start = 0
        for group in samples:
            part = table[:, start : start + len(group.x), 0]
            start += len(group.x)
            first, end = group.task.offset, group.task.offset + (group.task.classes or 0)
            np.add(group.y.cpu().numpy(), first, out=part[0])
            part[1], part[2] = (0, total) if self._model.scenario == "class" else (first, end)
        return torch.from_numpy(table)

    def logits(self, column: "StaticColumn", task: Task) -> Tensor:
        """A copy of the logits that a column of this task has just found: those of the task, or of all classes."""
        if self._model.scenario == "class":
            return column.logits[:, : sum(task.classes or 0 for task in self._model.classifiers)].clone()
        return column.logits[:, task.offset : task.offset + (task.classes or 0)].clone()


class StaticColumn:
    """The tensors that a graph reads and writes, for batches of one size, and the work between them."""

    def __init__(self, model: SharedModel, joint: JointClassifier, x: Tensor, size: int) -> None:
        device = model.device
        self._model = model
        self.joint = joint
        self._averages = [buffer for buffer in model.backbone.buffers() if buffer.is_floating_point()]
        self._x = torch.empty((size, *x.shape[1:]), dtype=x.dtype, device=device)
        self._classes = torch.zeros(3, size, 1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(joint.capacity, device=device)
        self.signs = torch.zeros(3, dtype=torch.float64, device=device)
        self.logits = joint.gradient.new_zeros(size, joint.capacity)
        self.run: Callable[[], None] = self.work

    def fill(self, inputs: Sequence[Tensor], classes: Tensor) -> None:
        """Put in the next batch."""
        start = 0
        for part in inputs:
            self._x[start : start + len(part)].copy_(part, non_blocking=True)
            start += len(part)
        self._classes.copy_(classes, non_blocking=True)

    def work(self) -> None:
        """The column, eagerly."""
        loss = self._loss()
        self.joint.backward(loss)
        averages = size_of(self._averages, loss.detach())
        self.signs.copy_(torch.stack([loss.detach(), self.joint.gradient.norm(), averages]))

    def _loss(self) -> Tensor:
        labels, first, end = self._classes
        with self._model.precision():
            logits = linear(self._model.backbone(self._x), self.joint.weight, self.joint.bias)
        logits = logits.float() if logits.dtype == self._model.autocast else logits
        self.logits.copy_(logits.detach())
        outside = (self._numbers < first) | (self._numbers >= end)
        return cross_entropy(logits.masked_fill(outside, float("-inf")), labels.squeeze(1))


class _StaticStep:
    """The columns of several tasks, one after the other, each into its own row."""

    def __init__(self, columns: Sequence[StaticColumn], rows: GradientRows, signs: Tensor) -> None:
        self.columns = columns
        self._lines = list(rows.buffer[: len(columns)])
        self._signs = list(signs[: len(columns)])
        self.run: Callable[[], None] = self.work

    def work(self) -> None:
        """All columns, eagerly."""
        for column, line, signs in zip(self.columns, self._lines, self._signs, strict=True):
            column.work()
            line.copy_(column.joint.shared)
            signs.copy_(column.signs)
