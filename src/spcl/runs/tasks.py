"""The tasks of a run: what they predict, and how each is added to the learner, from plain data."""

import zlib
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from spcl.data import Kind
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.losses import LOSSES, Loss, TaskDescription
from spcl.registry import named_options
from spcl.runs.settings import RunSettings
from spcl.suggestions import did_you_mean

__all__ = ["METRICS", "Metric", "RunTask", "add_task", "check_losses", "make_heads", "make_losses"]

Metric = Literal["accuracy", "R²", "F1"]
"""The score of a task, in per cent: accuracy, 100·R² or micro-averaged F1."""

PLAIN_LOSS = "cross-entropy"

METRICS: dict[Kind, Metric] = {"classification": "accuracy", "regression": "R²", "multilabel": "F1"}
"""The score of each kind of task."""


class RunTask(BaseModel):
    """A task of a run, described by plain data from which its head and loss can be made again.

    Attributes:
        name: its name.
        kind: what its targets are.
        outputs: the number of its classes, labels or numbers.
        class_names: the names of its classes or outputs; empty where they have none.
        class_counts: how many training samples every class or label has; empty where targets are numbers.

    >>> RunTask(name="speed", kind="regression", outputs=1).metric
    'R²'
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: Kind = "classification"
    outputs: int
    class_names: tuple[str, ...] = ()
    class_counts: tuple[int, ...] = ()

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of its classes or outputs, or their indices where they have none."""
        return self.class_names or tuple(map(str, range(self.outputs)))

    @property
    def metric(self) -> Metric:
        """The score that the task is evaluated by."""
        return METRICS[self.kind]


def add_task(learner: Learner, task: RunTask, settings: RunSettings) -> None:
    """Start a task of a run: a classifier, or a linear head with the loss of its kind."""
    if task.kind == "classification":
        named = all(task.class_names) and len(set(task.class_names)) == task.outputs  # published names may repeat
        loss = make_losses([task], settings).get(task.name)
        learner.add_task(task.name, classes=task.class_names if named else task.outputs, loss=loss)
    else:
        head, loss = make_heads([task], learner.model.backbone, settings)[task.name]
        learner.add_task(task.name, head=head, loss=loss)


def make_losses(tasks: Iterable[RunTask], settings: RunSettings) -> dict[str, Loss]:
    """Make the losses of classification tasks, as :meth:`Learner.load` takes them; none for plain cross-entropy."""
    if settings.loss == PLAIN_LOSS:
        return {}
    return {task.name: _loss(task, settings) for task in tasks if task.kind == "classification"}


def check_losses(tasks: Iterable[RunTask], class_names: Iterable[str], settings: RunSettings) -> None:
    """Raise an error if cross-entropy does not fit these tasks, or weighs a class that is none of the data's classes.

    Args:
        tasks: of a run.
        class_names: of all classes of the data, which may be more than those of the tasks.
        settings: of the run.
    """
    name, options = named_options(settings.loss, "loss")
    if name != PLAIN_LOSS:
        return
    make_losses(tasks, settings)
    weights = options.get("class_weights")
    known = sorted(set(class_names))
    for weighted in map(str, weights) if isinstance(weights, Mapping) else ():
        if weighted not in known:
            hint = did_you_mean(weighted, known) if known else "it has no classes"
            raise SpclError(f"class_weights of the loss names {weighted!r}, no class of {settings.benchmark}; {hint}")


def make_heads(
    tasks: Iterable[RunTask], backbone: nn.Module, settings: RunSettings
) -> dict[str, tuple[nn.Module, Loss]]:
    """Make head and loss of every task that is no classification, as :meth:`Learner.load` takes them.

    The weights of a head depend on the seed and the task's name only.
    """
    others = [task for task in tasks if task.kind != "classification"]
    return {task.name: (_linear(task, backbone, settings.seed), _loss(task, settings)) for task in others}


def _loss(task: RunTask, settings: RunSettings) -> Loss:
    by_kind = {
        "classification": settings.loss,
        "regression": settings.regression_loss,
        "multilabel": settings.multilabel_loss,
    }
    classes = None if task.kind == "regression" else task.outputs
    description = TaskDescription(task.name, task.kind, classes, task.class_counts or None, task.class_names or None)
    loss: Loss = LOSSES.make(by_kind[task.kind], description)
    return loss


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
