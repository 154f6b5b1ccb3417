"""A column's whole work as one CUDA graph, for classifiers with linear heads."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.cuda_graphs.graphs import MOST_SHAPES, Graphs
from spcl.cuda_graphs.joint_classifier import JointClassifier, JointGradient, own_classes
from spcl.cuda_graphs.static_column import StaticColumn
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples, SharedModel
from spcl.methods.base import Task

__all__ = ["CapturedColumns"]


class CapturedColumns:
    """Forward, loss and backward of a batch as one CUDA graph per batch size, for classifiers with linear heads.

    Every sample carries the range of classes its softmax covers (its task's, or all that were added), so the graph
    knows neither tasks nor scenario: columns of tasks and of memory replay the same one. What it computes is what the
    eager engine computes. The first batch of a size, and on a device without graphs every batch, is worked on eagerly
    in the same way: a size that never returns is not worth a graph.

    Attributes:
        gradient: of the latest column, and of all heads in this step; None before the first column.
    """

    def __init__(self, model: SharedModel, rows: GradientMatrix, graphs: Graphs, keeps_logits: bool) -> None:
        self._model = model
        self._rows = rows
        self._graphs = graphs
        self._keeps_logits = keeps_logits
        self._seen: set[tuple[object, ...]] = set()
        self._columns: dict[tuple[object, ...], StaticColumn] = {}
        self._joint: JointClassifier | None = None
        self.gradient: JointGradient | None = None
        self._head_gradients: dict[Task, list[tuple[nn.Parameter, Tensor]]] = {}
        self._trained: dict[Task, None] = {}

    def begin(self) -> None:
        """A step begins: heads have no gradient yet."""
        self._trained = {}
        if self.gradient is not None:
            self.gradient.heads.zero_()

    def takes(self, samples: Sequence[Samples]) -> bool:
        """Whether all of these are classifiers, to be trained by cross-entropy."""
        plain = all(group.task.classes is not None and group.task.loss is cross_entropy for group in samples)
        return plain and self._model.backbone.training

    def replay(self, samples: Sequence[Samples], inputs: Sequence[Tensor], signs: Tensor) -> StaticColumn:
        """Add the column's gradient to the row that was started, and to those of the heads; write its signs."""
        column = self._column(samples)
        column.fill(inputs, self.classes_of(samples))
        if column.replay is None:
            self._graphs.rehearse(column.work)
        else:
            column.replay()
        self._rows.add(column.gradient.shared)
        signs.copy_(column.signs)
        self.note_trained(samples)
        return column

    def logits(self, column: StaticColumn, task: Task) -> Tensor:
        """A copy of the logits that a column of this task has just found: those of the task, or of all classes."""
        assert column.logits is not None
        if self._model.scenario == "class":
            return column.logits[:, : sum(task.classes or 0 for task in self._model.classifiers)].clone()
        return column.logits[:, own_classes(task)].clone()

    def head_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What the heads got in this step; written over in the next one."""
        return [pair for task in self._trained for pair in self._head_gradients[task]]

    def new_column(self, gradient: JointGradient | None, x: Tensor, classes: Tensor) -> StaticColumn:
        """A column for inputs like these, with labels in ``classes``; it has a gradient of its own if none is given."""
        joint = self.adopted()
        own = gradient or JointGradient(joint, self._rows)
        return StaticColumn(self._model, joint, own, x, classes, self._keeps_logits)

    def new_classes(self, size: int) -> Tensor:
        """Room on the device for what :meth:`classes_of` gives."""
        return torch.zeros(2, size, dtype=torch.int64, device=self._model.device)

    def classes_of(self, samples: Sequence[Samples]) -> Tensor:
        """The label of every sample as an index into the joint logits, and the first class of its range."""
        joint = self.adopted()
        table = np.empty((2, sum([group.x.shape[0] for group in samples])), dtype=np.int64)
        start = 0
        for group in samples:
            part = table[:, start : start + group.x.shape[0]]
            start += group.x.shape[0]
            np.add(group.y.cpu().numpy(), group.task.offset, out=part[0])
            part[1] = joint.first_class(group.task)
        return torch.from_numpy(table)

    def note_trained(self, samples: Sequence[Samples]) -> None:
        """Remember whose heads have got a gradient in this step."""
        classifiers = self._model.classifiers if self._model.scenario == "class" else [group.task for group in samples]
        self._trained |= dict.fromkeys(classifiers)

    def _column(self, samples: Sequence[Samples]) -> StaticColumn:
        self.adopted()
        size = sum([group.x.shape[0] for group in samples])
        key = self._graphs.key(size, samples[0].x)
        column = self._columns.get(key)
        if column is None:
            column = self.new_column(self.gradient, samples[0].x, self.new_classes(size))
            if key in self._seen and len(self._columns) < MOST_SHAPES:
                (column.replay,) = self._graphs.capture([column.work]) or (None,)
                self._columns[key] = column
            self._seen.add(key)
        return column

    def adopted(self) -> JointClassifier:
        """The joint classifier, with the heads of all tasks in it."""
        if self._joint is None:
            features, like = int(self._model.feature_dim or 0), self._rows.buffer.new_empty(0)
            self._joint = JointClassifier(features, self._model.scenario == "class", like)
        classifiers = self._model.classifiers
        if self._joint.adopt(classifiers):
            self.gradient = None
            self._columns.clear()
            self._head_gradients.clear()
        if self.gradient is None and classifiers:
            self.gradient = JointGradient(self._joint, self._rows)
        if self.gradient is not None:
            for task in classifiers[len(self._head_gradients) :]:
                self._head_gradients[task] = self.gradient.of_head(task)
        return self._joint
