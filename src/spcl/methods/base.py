"""Base class of methods; tasks, outputs and what a weighting sees."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.errors import SpclError, TaskError
from spcl.memory import Memory, ReplayBatch
from spcl.validation import validated

__all__ = [
    "CURRENT",
    "FAMILIES",
    "MEMORY",
    "Gradients",
    "LookAhead",
    "Loss",
    "Method",
    "MethodSettings",
    "Output",
    "Reduction",
    "Task",
    "Weights",
    "classifier_task",
    "describe",
    "describe_samples",
]

Loss = Callable[[Tensor, Tensor], Tensor]
Reduction = Literal["none", "mean", "sum"]

FAMILIES = {"MTL": "Multi-task learning", "SCL": "Serial continual learning", "PCL": "Parallel continual learning"}
"""The families of methods, in the order of lists and tables."""

MEMORY = "memory"
"""The name of the gradient of the replayed samples; no task may have it."""

CURRENT = "current"
"""The name of the mean gradient of the tasks in training, for methods with ``reduction = "mean"``."""


@dataclass(eq=False)
class Task:
    """A source of data: a classifier with ``classes`` classes or, with ``classes=None``, a head and loss of its own.

    Attributes:
        name: its name, unique in the learner.
        classes: the number of classes, or None.
        loss: (output of the head, targets) → scalar.
        head: the module on top of the shared backbone; a classifier's is made when its first batch arrives.
        offset: the index of its first class among all classes seen.
        finished: whether :meth:`Learner.finish_task` was called.
        signature: shapes and types of one sample and target, fixed by the first batch.
        skipped: in how many steps it was skipped because its loss or gradient was not finite.
        skipped_in_a_row: in how many of the latest steps.
    """

    name: str
    classes: int | None
    loss: Loss
    head: nn.Module | None
    offset: int
    finished: bool = False
    signature: tuple[str, str] | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    _kind: object = None  # cache: kind of the last batch that fitted the signature

    def check_batch(self, x: Tensor, y: Tensor) -> None:
        """Refuse a batch that this task cannot be trained on."""
        if self.finished:
            raise TaskError(f"task {self.name!r} is finished; start a new one with add_task")
        self.check_samples(x, y)

    def check_samples(self, x: Tensor, y: Tensor) -> None:
        """Refuse samples that do not fit this task."""
        if x.ndim == 0 or len(x) == 0:
            raise TaskError(
                f"task {self.name!r}: the batch is empty (x has shape {tuple(x.shape)}); leave the task out instead"
            )
        if y.ndim == 0 or len(y) != len(x):
            raise TaskError(f"task {self.name!r}: {len(x)} inputs but targets of shape {tuple(y.shape)}")
        kind = x.dtype, x.shape[1:], y.dtype, y.shape[1:]
        if self.signature is not None and kind != self._kind:
            signature = describe_samples(x, y)
            if signature != self.signature:
                raise TaskError(
                    f"task {self.name!r}: its samples are {' with targets '.join(self.signature)}, "
                    f"but this batch has {' with targets '.join(signature)}"
                )
            self._kind = kind
        if self.classes is not None:
            check_labels(f"task {self.name!r}", y, self.classes)


@dataclass(frozen=True)
class Output:
    """The model's output for samples of one task.

    Attributes:
        task: the task.
        value: for a classifier the logits (class-incremental: of all classes seen, task-incremental: of its own), else
            the output of its head.
        targets: the labels as indices into the logits, else the targets as they came.
        own: the columns of ``value`` that are the task's own classes.
        stored: the logits stored in memory with these samples, NaN for classes added later; None if there are none.
    """

    task: Task
    value: Tensor
    targets: Tensor
    own: slice
    stored: Tensor | None = None

    def loss(self) -> Tensor:
        """Return the task's loss on these samples."""
        return self.task.loss(self.value, self.targets)


def check_labels(owner: str, y: Tensor, classes: int) -> None:
    """Refuse what is no vector of labels of so many classes; the error begins with their owner."""
    if y.ndim != 1 or y.dtype != torch.int64:
        raise TaskError(
            f"{owner}: class labels must be a vector of int64, but they are {y.dtype} of shape {tuple(y.shape)}"
        )
    lowest, highest = (int(bound) for bound in torch.aminmax(y)) if len(y) else (0, 0)
    if lowest < 0 or highest >= classes:
        wrong = lowest if lowest < 0 else highest
        raise TaskError(f"{owner} has classes 0 to {classes - 1}, but the batch has label {wrong}")


def describe_samples(x: Tensor, y: Tensor) -> tuple[str, str]:
    """Return type and shape of one sample and of one target as text."""
    return describe(x, 1), describe(y, 1)


def describe(tensor: Tensor, skipped: int = 0) -> str:
    """Return type and shape as text, without the first ``skipped`` dimensions."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[skipped:])}"


def classifier_task(name: str, classes: int, offset: int) -> Task:
    """Return a classification task with cross-entropy loss; its head is made with its first batch."""
    return Task(name, classes, cross_entropy, None, offset)


class MethodSettings(BaseModel):
    """Settings that every method has; unknown names and values out of range are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    alpha: float = Field(0.0, ge=0.0, description="α, weight of the DBT orthogonality penalty (paper, eq. 4); 0 is off")
    decoupled: bool = Field(
        False,
        description="add the orthogonality gradient to the update after the weighting, not to every task's gradient",
    )


@dataclass(frozen=True)
class Gradients:
    """Input of a weighting: names, losses and Gramian of the reduced gradients.

    Attributes:
        names: the tasks in the order they were added, then ``"memory"`` once it holds samples. With ``reduction =
            "mean"``, ``("current", "memory")`` instead.
        losses: their losses; NaN with ``reduction = "sum"``, whose weights are computed before the losses are known.
        gramian: their inner products, float64 on the CPU; None with ``reduction = "sum"``, and where a method with
            ``uses_gramian = False`` is trained without measuring stability.
    """

    names: tuple[str, ...]
    losses: np.ndarray[tuple[int], np.dtype[np.float64]]
    gramian: Tensor | None

    def known_gramian(self) -> Tensor:
        """Return the Gramian, for methods that always have one."""
        return cast(Tensor, self.gramian)


@dataclass(frozen=True)
class Weights:
    r"""The result of a weighting.

    Attributes:
        values: one weight per gradient; the update is :math:`\sum_i w_i g_i`.
        adjusted: the Gramian of the adjusted gradients, if they are other than :math:`w_i g_i`.
    """

    values: Tensor
    adjusted: Tensor | None = None

    def adjusted_gramian(self, gramian: Tensor) -> Tensor:
        """Return the Gramian of the adjusted gradients, given that of the gradients."""
        return self.adjusted if self.adjusted is not None else gramian * torch.outer(self.values, self.values)


class LookAhead(Protocol):
    """Access to the model for :meth:`Method.edit`."""

    def loss(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the summed loss of the samples in evaluation mode, with these inputs instead of the stored ones."""
        ...

    def ahead(self, rate: float) -> AbstractContextManager[None]:
        """Move the shared parameters, within the block, by a step along the current tasks' mean gradient."""
        ...


class Method:
    """A method for parallel continual learning.

    A subclass declares its name and settings and overrides as little as it needs: the losses (:meth:`task_loss`,
    :meth:`memory_loss`), the ``reduction`` of the gradients and the weighting (:meth:`weigh`). A rule that is not a
    weighted sum overrides :meth:`combine` instead. State that lasts from step to step goes through :meth:`state_dict`.

    ``reduction`` says what becomes of the gradients before they are weighed:

    - ``"none"``: every task's gradient and that of memory are weighed separately;
    - ``"mean"``: the mean of the current tasks' gradients is weighed against that of memory;
    - ``"sum"``: the weights are known before the gradients are (``weigh`` gets no Gramian and no losses), so that the
      weighted sum is accumulated and no gradient matrix is held.

    A subclass may also declare: ``uses_gramian = False`` if ``weigh`` reads only the losses; ``draws``, the number of
    replay batches in a step; ``stores_logits`` if memory must store the logits of its samples; ``edits_memory`` if
    :meth:`edit` changes them; ``joint_logits`` if losses cover the classes of all tasks, also task-incrementally;
    ``order``, its place among the methods of its family in lists.

    >>> class Sum(Method):
    ...     name = "plain-sum"
    ...
    ...     def weigh(self, gradients):
    ...         return Weights(torch.ones(len(gradients.names)))
    >>> Sum(alpha=0.1)
    Sum(alpha=0.1)
    """

    name: ClassVar[str]
    family: ClassVar[Literal["MTL", "SCL", "PCL", "TorchJD"]]
    summary: ClassVar[str]
    reference: ClassVar[str]
    reduction: ClassVar[Reduction] = "none"
    uses_gramian: ClassVar[bool] = True
    draws: ClassVar[int] = 1
    stores_logits: ClassVar[bool] = False
    edits_memory: ClassVar[bool] = False
    joint_logits: ClassVar[bool] = False
    order: ClassVar[float]
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    settings: MethodSettings

    def __init__(self, **settings: Any) -> None:
        self.check_declared()
        self.settings = validated(self.Settings, settings, f"method {self.name!r}")

    @classmethod
    def check_declared(cls) -> None:
        """Refuse a class that declares no name."""
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name:
            raise SpclError(
                f"the method {cls.__module__}.{cls.__qualname__} has the name {name!r}; "
                f"declare a text in the class, e.g. name = {cls.__name__.lower()!r}"
            )

    def check_task(self, task: Task, x: Tensor, memory: Memory | None) -> None:
        """Refuse a task that the method cannot train, given the inputs of its first batch."""

    def make_head(self, features: int, classes: int) -> nn.Module:
        """Return the head of a classifier."""
        return nn.Linear(features, classes)

    def task_loss(self, output: Output) -> Tensor:
        """Return the loss of a task on its own batch."""
        return output.loss()

    def memory_loss(self, outputs: Sequence[Output], draw: int) -> Tensor:
        """Return the loss on replayed samples, by default the mean over all; ``draw`` counts the step's batches."""
        total = sum(len(output.targets) for output in outputs)
        return torch.stack([self.task_loss(output) * (len(output.targets) / total) for output in outputs]).sum()

    def has_plain_task_loss(self) -> bool:
        """Return whether classifiers are linear and trained by cross-entropy over their own or all classes seen."""
        mine = type(self)
        return mine.task_loss is Method.task_loss and mine.make_head is Method.make_head and not self.joint_logits

    def has_plain_memory_loss(self) -> bool:
        """Return whether replayed samples are trained by the same plain loss as the tasks' own."""
        return self.has_plain_task_loss() and type(self).memory_loss is Method.memory_loss

    def edit(self, batches: Sequence[ReplayBatch], model: LookAhead) -> list[Tensor]:
        """Return new inputs for replayed samples, which are written back to memory; called if ``edits_memory``."""
        raise NotImplementedError(f"method {self.name!r} has edits_memory = True but does not override edit")

    def weigh(self, gradients: Gradients) -> Weights:
        """Return one weight per gradient."""
        raise NotImplementedError(f"method {self.name!r} overrides neither weigh nor combine")

    @property
    def elementwise(self) -> bool:
        """Whether the method overrides :meth:`combine`, because its rule is not a weighted sum."""
        return type(self).combine is not Method.combine

    def combine(self, gradients: Tensor) -> Tensor:
        """Return the update from the T×n gradients, which may be overwritten; called if overridden."""
        raise NotImplementedError(f"method {self.name!r} weighs gradients and does not combine them itself")

    def after_step(self, losses: Mapping[str, float]) -> None:
        """Receive the losses of the gradients that took part in a step, once it is done."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data and tensors; tensors that later steps change in place must be copies."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        if state:
            raise SpclError(f"method {self.name!r} keeps no state, but was given {sorted(state)}")

    def __repr__(self) -> str:
        changed = self.settings.model_dump(exclude_defaults=True) if hasattr(self, "settings") else {}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in changed.items())})"
