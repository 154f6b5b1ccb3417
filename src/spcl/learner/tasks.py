"""A task, and what the model gave for some of its samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.errors import TaskError

__all__ = ["MEMORY", "Loss", "Output", "Task"]

MEMORY = "memory"
"""The name of the column that holds the gradient of the rehearsal memory; no task may be called so."""

Loss = Callable[[Tensor, Tensor], Tensor]


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
        left_out: in how many steps it was left out, in all and in a row up to now.
    """

    name: str
    classes: int | None
    loss: Loss
    head: nn.Module | None
    offset: int
    finished: bool = False
    signature: tuple[str, str] | None = None
    left_out: int = 0
    left_out_in_a_row: int = 0
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
