"""What a method is: the loss of tasks and memory, how memory enters, and the weighting of the columns."""

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
]

Loss = Callable[[Tensor, Tensor], Tensor]
Reduction = Literal["none", "mean", "sum"]

MEMORY = "memory"
"""The name of the gradient of the replayed samples; no task may have it."""

CURRENT = "current"
"""The name of the column that holds the mean gradient of the current tasks, for methods with ``reduction = "mean"``."""


@dataclass(eq=False)
class Task:
    """One source of data: a classifier of ``classes`` classes, or, with ``classes=None``, a head and loss of its own.

    Attributes:
        name: its name, unique in the learner.
        classes: the number of classes, or None.
        loss: (output of the head, targets) → scalar.
        head: the module on top of the shared backbone; a classifier's is made when its first batch arrives.
        offset: where its classes begin among all classes seen.
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
    _kind: object = None  # of the last batch that was compared with the signature, which takes longer

    def check_batch(self, x: Tensor, y: Tensor) -> None:
        """Refuse a batch that cannot be of this task, naming what was found; nothing is changed."""
        if self.finished:
            raise TaskError(f"task {self.name!r} is finished; start a new one with add_task")
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
            self._check_labels(y, self.classes)

    def _check_labels(self, y: Tensor, classes: int) -> None:
        if y.ndim != 1 or y.dtype != torch.int64:
            raise TaskError(
                f"task {self.name!r}: class labels must be a vector of int64, "
                f"but they are {y.dtype} of shape {tuple(y.shape)}"
            )
        lowest, highest = (int(bound) for bound in torch.aminmax(y))
        if lowest < 0 or highest >= classes:
            wrong = lowest if lowest < 0 else highest
            raise TaskError(f"task {self.name!r} has classes 0 to {classes - 1}, but the batch has label {wrong}")


@dataclass(frozen=True)
class Output:
    """What the model gave for samples of one task.

    Attributes:
        task: the task.
        value: for a classifier the logits (class-incremental: of all classes seen, task-incremental: of its own), else
            what its head returned.
        targets: the labels as indices into the logits, else the targets as they came.
        own: the columns of ``value`` that are the task's own classes.
        stored: the logits kept in memory with these samples, NaN for classes not known then; None if none are kept.
    """

    task: Task
    value: Tensor
    targets: Tensor
    own: slice
    stored: Tensor | None = None

    def loss(self) -> Tensor:
        """The task's loss on these samples."""
        return self.task.loss(self.value, self.targets)


def describe_samples(x: Tensor, y: Tensor) -> tuple[str, str]:
    """Type and shape of one sample and of one target, as text."""
    return describe(x, 1), describe(y, 1)


def describe(tensor: Tensor, skipped: int = 0) -> str:
    """Type and shape as text, leaving out so many of its first dimensions."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[skipped:])}"


def classifier_task(name: str, classes: int, offset: int) -> Task:
    """A classification task, by cross-entropy; its head comes later."""
    return Task(name, classes, cross_entropy, None, offset)


class MethodSettings(BaseModel):
    """Settings that every method has; unknown names and values out of range are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    alpha: float = Field(0.0, ge=0.0, description="α, weight of the DBT orthogonality penalty (paper, eq. 4); 0 is off")
    decoupled: bool = Field(
        False,
        description="add the orthogonality gradient to the update after the weighting, not to every task's column",
    )


@dataclass(frozen=True)
class Gradients:
    """The gradients of one step, as far as a weighting may know them.

    Attributes:
        names: the tasks in the order they were added, then ``"memory"`` once there is something to rehearse. A method
            with ``reduction = "mean"`` sees ``("current", "memory")`` instead.
        losses: their losses; NaN for a method with ``reduction = "sum"``, whose weights are asked for first.
        gramian: their inner products, float64 on the CPU; None for ``reduction = "sum"``.
    """

    names: tuple[str, ...]
    losses: np.ndarray[tuple[int], np.dtype[np.float64]]
    gramian: Tensor | None

    def known_gramian(self) -> Tensor:
        """The Gramian, for methods whose reduction guarantees one."""
        return cast(Tensor, self.gramian)


@dataclass(frozen=True)
class Weights:
    """The answer of a weighting: one weight per column, and the Gramian of the adjusted columns if it is known.

    Where a rule only weighs the columns, their adjusted form is w_i g_i.
    """

    values: Tensor
    adjusted: Tensor | None = None

    def adjusted_gramian(self, gramian: Tensor) -> Tensor:
        """The Gramian after adjustment."""
        return self.adjusted if self.adjusted is not None else gramian * torch.outer(self.values, self.values)


class LookAhead(Protocol):
    """What :meth:`Method.edit` may ask of the engine while it edits rehearsal samples."""

    def loss(self, inputs: Sequence[Tensor]) -> Tensor:
        """The summed loss of the samples, in evaluation mode, with these inputs in place of the stored ones."""
        ...

    def ahead(self, rate: float) -> AbstractContextManager[None]:
        """Within the block the shared parameters are a step of this rate down the current tasks' mean gradient."""
        ...


class Method:
    """A recipe for parallel continual learning; the engine asks it, and knows no method by name.

    A subclass says its name and settings, then overrides as little as it needs: the loss (:meth:`task_loss`,
    :meth:`memory_loss`), how memory enters (``reduction``) and the weighting (:meth:`weigh`). What it remembers between
    steps goes through :meth:`state_dict`.

    ``reduction`` says what becomes of the columns before they are weighed:

    - ``"none"``: nothing; every task and the memory are columns of their own.
    - ``"mean"``: the current tasks are averaged into one column beside the memory.
    - ``"sum"``: the weights are known before the gradients are (``weigh`` gets no Gramian and no losses), so the
      weighted sum is formed on the way and no gradient matrix is held at all.

    Other things a subclass may declare: ``uses_gramian = False`` if ``weigh`` reads only the losses; ``elementwise`` if
    it is no weighting and :meth:`combine` works on the gradients themselves; ``draws``, how many batches of memory a
    step takes; ``stores_logits`` if memory must keep the logits of its samples; ``edits_memory`` if :meth:`edit`
    changes them; ``joint_logits`` if losses cover the classes of all tasks, also task-incrementally.
    """

    name: ClassVar[str]
    family: ClassVar[Literal["MTL", "SCL", "PCL", "TorchJD"]]
    summary: ClassVar[str]
    reference: ClassVar[str]
    reduction: ClassVar[Reduction] = "none"
    uses_gramian: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    draws: ClassVar[int] = 1
    stores_logits: ClassVar[bool] = False
    edits_memory: ClassVar[bool] = False
    joint_logits: ClassVar[bool] = False
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    settings: MethodSettings

    def __init__(self, **settings: Any) -> None:
        self.settings = validated(self.Settings, settings, f"method {self.name!r}")

    def check_task(self, task: Task, x: Tensor, memory: Memory | None) -> None:
        """Refuse a task that it cannot train, given the inputs of its first batch; nothing has changed yet."""

    def make_head(self, features: int, classes: int) -> nn.Module:
        """The classifier on top of the backbone's features."""
        return nn.Linear(features, classes)

    def task_loss(self, output: Output) -> Tensor:
        """The loss of a task on its own batch."""
        return output.loss()

    def memory_loss(self, outputs: Sequence[Output], draw: int) -> Tensor:
        """The loss on rehearsal samples, the mean over samples of all tasks; ``draw`` counts up to ``draws``."""
        total = sum(len(output.targets) for output in outputs)
        return torch.stack([self.task_loss(output) * (len(output.targets) / total) for output in outputs]).sum()

    def has_plain_task_loss(self) -> bool:
        """Whether classifiers are linear and trained by cross-entropy over their own or all classes seen."""
        mine = type(self)
        return mine.task_loss is Method.task_loss and mine.make_head is Method.make_head and not self.joint_logits

    def has_plain_memory_loss(self) -> bool:
        """Whether rehearsal samples are trained on as the tasks' own are, by a plain loss."""
        return self.has_plain_task_loss() and type(self).memory_loss is Method.memory_loss

    def edit(self, rehearsals: Sequence[ReplayBatch], model: LookAhead) -> list[Tensor]:
        """New inputs for rehearsal samples, written back to memory; asked only if ``edits_memory``."""
        raise NotImplementedError(f"method {self.name!r} edits memory but does not say how")

    def weigh(self, gradients: Gradients) -> Weights:
        """One weight per column."""
        raise NotImplementedError(f"method {self.name!r} does not say how columns are weighed")

    def combine(self, rows: Tensor) -> Tensor:
        """The update from the T×n gradients, which it may overwrite; asked only if ``elementwise``."""
        raise NotImplementedError(f"method {self.name!r} is elementwise but does not say how rows are combined")

    def after_step(self, losses: Mapping[str, float]) -> None:
        """Told the losses of the columns that took part, once the step is done."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved with the learner, as plain data and tensors; copies of those that it changes in place."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        if state:
            raise SpclError(f"method {self.name!r} keeps no state, but was given {sorted(state)}")

    def __repr__(self) -> str:
        changed = self.settings.model_dump(exclude_defaults=True)
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in changed.items())})"
