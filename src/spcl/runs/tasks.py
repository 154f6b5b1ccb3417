"""The tasks of a run: what they predict, and how each is added to the learner, from plain data."""

import zlib
from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from spcl.data import Kind
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.losses import Loss, TaskDescription

__all__ = ["METRICS", "Metric", "RunTask", "add_task", "make_heads"]

Metric = Literal["accuracy", "R²", "F1"]
"""The score of a task, in per cent: accuracy, 100·R² or micro-averaged F1."""

METRICS: dict[Kind, Metric] = {"classification": "accuracy", "regression": "R²", "multilabel": "F1"}
"""The score of each kind of task."""


class RunTask(BaseModel):
    """A task of a run, described by plain data from which its head and loss can be made again.

    Attributes:
        name: its name.
        kind: what its targets are.
        outputs: the number of its classes, labels or numbers.
        class_names: the names of its classes or outputs; empty where they have none.
        class_counts: the number of training samples of every class; None where there are no classes.

    >>> RunTask(name="speed", kind="regression", outputs=1).metric
    'R²'
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: Kind = "classification"
    outputs: int
    class_names: tuple[str, ...] = ()
    class_counts: tuple[int, ...] | None = None

    def description(self) -> TaskDescription:
        """Return what a loss may depend on."""
        classes = None if self.kind == "regression" else self.outputs
        return TaskDescription(self.name, self.kind, classes, self.class_counts)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of its classes or outputs, or their indices where they have none."""
        return self.class_names or tuple(map(str, range(self.outputs)))

    @property
    def metric(self) -> Metric:
        """The score that the task is evaluated by."""
        return METRICS[self.kind]


def add_task(learner: Learner, task: RunTask, loss: Loss | None = None) -> None:
    """Start a task: a classifier with this loss or cross-entropy, or a linear head with the loss of its kind."""
    if task.kind == "classification":
        named = all(task.class_names) and len(set(task.class_names)) == task.outputs  # published names may repeat
        learner.add_task(task.name, classes=task.class_names if named else task.outputs, loss=loss)
    else:
        head, loss = make_heads([task], learner.model.backbone, learner.seed)[task.name]
        learner.add_task(task.name, head=head, loss=loss)


def make_heads(tasks: Iterable[RunTask], backbone: nn.Module, seed: int) -> dict[str, tuple[nn.Module, Loss]]:
    """Make head and loss of every task that is no classification, as :meth:`Learner.load` takes them.

    The losses are the mean squared error of a regression and the binary cross-entropy of multi-label targets. The
    weights of a head depend on the seed and the task's name only.
    """
    heads: dict[str, tuple[nn.Module, Loss]] = {}
    for task in tasks:
        if task.kind != "classification":
            loss: Loss = mse_loss if task.kind == "regression" else binary_cross_entropy_with_logits
            heads[task.name] = (_linear(task, backbone, seed), loss)
    return heads


def _linear(task: RunTask, backbone: nn.Module, seed: int) -> nn.Module:
    features = getattr(backbone, "feature_dim", None)
    if not isinstance(features, int):
        raise SpclError(
            f"task {task.name!r} is a {task.kind}, whose head must know the number of features; "
            f"give the backbone {type(backbone).__name__} the attribute feature_dim"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed * 1_000_003 + zlib.crc32(task.name.encode()))
        return nn.Linear(features, task.outputs)
