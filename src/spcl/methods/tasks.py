"""Tasks, and the model's outputs for their samples."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.batches import Inputs, describe, number_of_samples, sample_kind
from spcl.errors import TaskError
from spcl.losses import CrossEntropy, Loss

__all__ = ["Output", "Task", "check_all_labels", "check_labels", "classifier_task", "describe_samples"]

PROBABILITY_TOLERANCE = 1e-4
"""By how much the sum of a target's probabilities may differ from 1."""


@dataclass(eq=False)
class Task:
    """A source of data: a classifier with ``classes`` classes or, with ``classes=None``, a head and loss of its own.

    Attributes:
        name: its name, unique in the learner.
        classes: the number of classes, or None.
        loss: (output of the head, targets) → scalar; a classifier's gets the logits of all classes that it is trained
            against, and labels as indices into them, or probabilities of the same shape.
        head: the module on top of the shared backbone; a classifier's is made when its first batch arrives.
        offset: the index of its first class among all classes seen.
        class_names: the names of its classes, if it has any.
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
    class_names: tuple[str, ...] | None = None
    finished: bool = False
    signature: tuple[str, str] | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    _kind: object = None  # cache: kind of the last batch that fitted the signature

    def check_batch(self, x: Inputs, y: Tensor) -> None:
        """Refuse a batch that this task cannot be trained on; its labels are left to :func:`check_all_labels`."""
        if self.finished:
            raise TaskError(f"task {self.name!r} is finished; start a new one with add_task")
        self._check_sizes(x, y)
        kind = sample_kind(x), sample_kind(y)
        if self.signature is not None and kind != self._kind:
            self._check_signature(*describe_samples(x, y))
            self._kind = kind

    def check_samples(self, x: Inputs, y: Tensor) -> None:
        """Refuse samples that this task cannot be evaluated on; labels may be classes where it learns probabilities."""
        self._check_sizes(x, y)
        if self.signature is not None:
            inputs, targets = describe_samples(x, y)
            self._check_signature(inputs, targets if self.classes is None else self.signature[1])
        if self.classes is not None:
            check_labels(f"task {self.name!r}", y, self.classes)

    def _check_sizes(self, x: Inputs, y: Tensor) -> None:
        count = number_of_samples(x)
        if not count:
            shape = f"x has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"x is {describe(x)}"
            raise TaskError(f"task {self.name!r}: the batch is empty ({shape}); leave the task out instead")
        if y.ndim == 0 or y.shape[0] != count:
            raise TaskError(f"task {self.name!r}: {count} inputs but targets of shape {tuple(y.shape)}")

    def _check_signature(self, *signature: str) -> None:
        if self.signature is not None and signature != self.signature:
            raise TaskError(
                f"task {self.name!r}: its samples are {' with targets '.join(self.signature)}, "
                f"but this batch has {' with targets '.join(signature)}; convert it (pad sequences to one length), "
                f"or add a task for such samples"
            )


@dataclass(frozen=True)
class Output:
    """The model's output for samples of one task.

    Attributes:
        task: the task.
        value: for a classifier the logits (class-incremental: of all classes seen, task-incremental: of its own), else
            the output of its head.
        targets: the labels as indices into the logits, or their probabilities; else the targets as they came.
        own: the columns of ``value`` that are the task's own classes.
        stored: the logits stored in memory with these samples, NaN for classes added later; None if there are none.
        offsets: added to the logits in cross-entropy, one per class; None for none.
    """

    task: Task
    value: Tensor
    targets: Tensor
    own: slice
    stored: Tensor | None = None
    offsets: Tensor | None = None

    def loss(self) -> Tensor:
        """Return the task's loss on these samples."""
        loss = self.task.loss
        if isinstance(loss, CrossEntropy):
            return loss(self.value, self.targets, self.own, self.offsets)
        return loss(self.with_offsets(self.value) if loss is cross_entropy else self.value, self.targets)

    def with_offsets(self, logits: Tensor) -> Tensor:
        """Return logits as cross-entropy compares them."""
        return logits if self.offsets is None else logits + self.offsets


def check_all_labels(targets: Iterable[tuple[Task, Tensor]]) -> None:
    """Refuse what :func:`check_labels` refuses, for the classifiers among the tasks of a step.

    The labels of tasks with as many classes are looked at together, which costs a GPU one synchronisation.
    """
    alike: dict[object, list[tuple[Task, Tensor]]] = {}
    for task, y in targets:
        if task.classes is not None:
            alike.setdefault((task.classes, y.dtype, y.ndim, y.device), []).append((task, y))
    for members in alike.values():
        task, first = members[0]
        if first.ndim == 1 and first.dtype == torch.int64:
            joint = torch.cat([y for _, y in members])
            if _wrong_label(joint, task.classes or 0) is None:
                continue
        for task, y in members:
            check_labels(f"task {task.name!r}", y, task.classes or 0)


def check_labels(owner: str, y: Tensor, classes: int) -> None:
    """Refuse what is neither labels nor probabilities of so many classes; the error begins with their owner."""
    if y.is_floating_point() and y.shape[1:] == (classes,):
        _check_probabilities(owner, y)
        return
    if y.ndim != 1 or y.dtype != torch.int64:
        raise TaskError(
            f"{owner}: class labels must be a vector of int64, or probabilities of shape (samples, {classes}), but "
            f"they are {y.dtype} of shape {tuple(y.shape)}"
        )
    if (wrong := _wrong_label(y, classes)) is not None:
        raise TaskError(
            f"{owner} has classes 0 to {classes - 1}, but the batch has label {wrong}; fix it, or add a task with more "
            f"classes"
        )


def _wrong_label(y: Tensor, classes: int) -> int | None:
    """Return a label that is none of the classes, or None."""
    if not y.numel():
        return None
    lowest, highest = (int(label) for label in torch.aminmax(y.cpu()))
    if lowest < 0:
        return lowest
    return highest if highest >= classes else None


def _check_probabilities(owner: str, y: Tensor) -> None:
    """Refuse rows that are negative or do not add up to 1 within 1e-4; NaN is neither."""
    sums = y.sum(dim=1, dtype=torch.float64)
    wrong = ~((sums - 1.0).abs() <= PROBABILITY_TOLERANCE) | ~(y >= 0.0).all(dim=1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise TaskError(
            f"{owner}: the probabilities of {int(wrong.sum())} of {len(y)} samples are negative or do not add up to 1 "
            f"(first: sample {row}, sum {float(sums[row]):.6g}, minimum {float(y[row].min()):.6g}); normalise them"
        )


def describe_samples(x: Inputs, y: Tensor) -> tuple[str, str]:
    """Return type and shape of one sample and of one target as text."""
    return describe(x, 1), describe(y, 1)


def classifier_task(
    name: str, classes: int, offset: int, loss: Loss | None = None, class_names: tuple[str, ...] | None = None
) -> Task:
    """Return a classification task, by default with plain cross-entropy; its head is made with its first batch."""
    if loss is None or loss == CrossEntropy():
        loss = cross_entropy
    return Task(name, classes, loss, None, offset, class_names)
