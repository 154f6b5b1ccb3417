"""Tasks: the one description of what a task predicts, the one check of its targets, tasks and sources in training."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from spcl.batches import Inputs, describe, kind_of_pair, number_of_samples
from spcl.errors import DataError, SpclError, TaskError

__all__ = ["NO_LABEL", "Kind", "Task", "TaskDescription", "TaskSource", "check_labels_of_sources", "check_targets"]

Kind = Literal["classification", "regression", "multilabel"]
"""What the targets of a task are: one class per sample, numbers, or any number of labels per sample."""

NO_LABEL = -100
"""The label of a sample without one: the ``ignore_index`` of PyTorch's losses."""

PROBABILITY_TOLERANCE = 1e-4
"""By how much the sum of a target's probabilities may differ from 1."""

INTEGERS = frozenset(
    (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64)
)


# -- what a task predicts


@dataclass(frozen=True)
class TaskDescription:
    """What a task predicts.

    Attributes:
        name: its name.
        kind: what its targets are.
        classes: the number of classes, labels or numbers that are predicted; None where it is not known.
        class_counts: the number of training samples of every class or label; None where they are not known.
        class_names: the names of the classes, labels or numbers; None where they have none.

    >>> TaskDescription.of("pets", classes=["cat", "dog"])
    TaskDescription(name='pets', kind='classification', classes=2, class_counts=None, class_names=('cat', 'dog'))
    >>> print(TaskDescription.of("speed", "regression"))
    regression with 1 output
    >>> TaskDescription.of("pets", classes=["cat", "cat"])
    Traceback (most recent call last):
    ...
    spcl.errors.TaskError: task 'pets': the names of classes must be different texts, but they are ['cat', 'cat']
    """

    name: str
    kind: Kind = "classification"
    classes: int | None = None
    class_counts: tuple[int, ...] | None = None
    class_names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, name: str, kind: str = "classification", classes: int | Sequence[str] | None = None) -> Self:
        """Return a checked description, or raise a :class:`~spcl.errors.TaskError`.

        Args:
            name: of the task.
            kind: what its targets are.
            classes: the number of classes, labels or numbers, or their names; by default one number for a regression.
        """
        if kind not in get_args(Kind):
            raise TaskError(f"task {name!r}: there is no kind {kind!r}; choose one of {', '.join(get_args(Kind))}")
        if classes is None and kind == "regression":
            classes = 1
        if isinstance(classes, int) and not isinstance(classes, bool) and classes >= 1:
            return cls(name, kind, classes)  # type: ignore[arg-type]
        if not isinstance(classes, tuple | list) or not classes:
            raise TaskError(
                f"task {name!r}: classes must be a positive whole number, or names, but it is {classes!r:.80}"
            )
        if not all(isinstance(each, str) and each for each in classes) or len(set(classes)) < len(classes):
            raise TaskError(
                f"task {name!r}: the names of classes must be different texts, but they are {classes!r:.80}"
            )
        return cls(name, kind, len(classes), class_names=tuple(classes))  # type: ignore[arg-type]

    @classmethod
    def inferred(cls, name: str, y: Tensor) -> Self:
        """Return the description that targets say enough for: of numbers, or of several labels per sample.

        >>> TaskDescription.inferred("signs", torch.zeros(2, 3, dtype=torch.bool)).kind
        'multilabel'
        """
        if y.is_floating_point() and y.ndim <= 2:
            return cls(name, "regression", y.shape[1] if y.ndim == 2 else 1)
        if y.ndim == 2:
            return cls(name, "multilabel", y.shape[1])
        raise DataError(
            f"the number of classes is not known from targets {describe(y, 1)}; announce the task, or configure classes"
        )

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the classes, labels or numbers, or their indices where they have none."""
        return self.class_names or tuple(map(str, range(self.classes or 0)))

    def __str__(self) -> str:
        """Return kind and size in words."""
        if self.kind == "classification":
            return f"{self.classes} classes"
        return f"{self.kind} with {self.classes} output{'' if self.classes == 1 else 's'}"

    def fit(self, y: Tensor) -> Tensor:
        """Return targets in the type that a learner trains on, or raise a :class:`~spcl.errors.DataError`.

        Labels of any integer type become int64, numbers and zeros and ones float32; a vector of numbers gets a second
        dimension.

        >>> TaskDescription("speed", "regression", 1).fit(torch.tensor([1, 2]))
        tensor([[1.],
                [2.]])
        """
        if self.kind == "classification":
            fitting = y.to(torch.int64) if y.dtype in INTEGERS else y.float() if y.is_floating_point() else y
        else:
            y = y.unsqueeze(1) if y.ndim == 1 and self.kind == "regression" else y
            convertible = not y.is_complex() and (self.kind == "multilabel" or y.dtype != torch.bool)
            fitting = y.float() if convertible else y
        check_targets(f"task {self.name!r}", fitting, self.kind, self.classes or 0, DataError)
        return fitting


# -- the check of targets


def check_targets(
    owner: str, y: Tensor, kind: Kind, classes: int, error: Callable[[str], SpclError] = TaskError
) -> None:
    """Raise an error unless targets are of this kind.

    Args:
        owner: whose targets they are; the error begins with it.
        y: the targets of a batch.
        kind: classification: int64 labels from 0, or probabilities of shape (samples, classes); regression:
            floating-point numbers; multilabel: zeros and ones, both of shape (samples, classes).
        classes: the number of classes, numbers or labels.
        error: the type of the error.

    >>> check_targets("task 'pets'", torch.tensor([0, 3]), "classification", 3)
    Traceback (most recent call last):
    ...
    spcl.errors.TaskError: task 'pets' has classes 0 to 2, but the batch has label 3; fix it, or give the task more
    classes by add_classes
    """
    if kind == "classification":
        if y.is_floating_point() and y.shape[1:] == (classes,):
            _check_probabilities(owner, y, error)
            return
        if y.ndim != 1 or y.dtype != torch.int64:
            raise error(
                f"{owner}: class labels must be a vector of int64, or probabilities of shape (samples, {classes}), but "
                f"they are {y.dtype} of shape {tuple(y.shape)}"
            )
        if (wrong := _label_outside(y, classes)) is not None:
            raise error(
                f"{owner} has classes 0 to {classes - 1}, but the batch has label {wrong}; fix it, or give the task "
                f"more classes by add_classes"
            )
        return
    if not y.is_floating_point() or y.shape[1:] != (classes,):
        wanted = "numbers" if kind == "regression" else "zeros or ones"
        raise error(
            f"{owner}: targets of a {kind} must be floating-point {wanted} of shape (samples, {classes}), but they are "
            f"{y.dtype} of shape {tuple(y.shape)}"
        )
    if kind == "multilabel" and not bool(((y == 0) | (y == 1)).all()):
        value = float(y[(y != 0) & (y != 1)][0])
        raise error(f"{owner}: targets of a multilabel task hold {value:.4g}; give 1 where a label is present, else 0")


def check_labels_of_sources(targets: Sequence[tuple["TaskSource", Tensor]]) -> None:
    """Raise an error if the targets of a classifier in a step are wrong.

    The labels of tasks with the same number of classes are looked at together: a GPU is waited for once.
    """
    alike: dict[object, list[tuple[TaskSource, Tensor]]] = {}
    for source, y in targets:
        if source.task.classes is not None:
            alike.setdefault((source.task.classes, y.dtype, y.ndim, y.device), []).append((source, y))
    for members in alike.values():
        source, first = members[0]
        if first.ndim == 1 and first.dtype == torch.int64:
            joint = torch.cat([y for _, y in members])
            if _label_outside(joint, source.task.classes or 0) is None:
                continue
        for each, y in members:
            each.check_targets(y)


def _label_outside(y: Tensor, classes: int) -> int | None:
    """Return a label that is not one of the classes; None if there is none."""
    if not y.numel():
        return None
    lowest, highest = (int(label) for label in torch.aminmax(y.cpu()))
    if lowest < 0:
        return lowest
    return highest if highest >= classes else None


def _check_probabilities(owner: str, y: Tensor, error: Callable[[str], SpclError]) -> None:
    """Refuse rows that are negative or do not add up to 1; NaN is neither."""
    sums = y.sum(dim=1, dtype=torch.float64)
    wrong = ~((sums - 1.0).abs() <= PROBABILITY_TOLERANCE) | ~(y >= 0.0).all(dim=1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise error(
            f"{owner}: the probabilities of {int(wrong.sum())} of {len(y)} samples are negative or do not add up to 1 "
            f"(first: sample {row}, sum {float(sums[row]):.6g}, minimum {float(y[row].min()):.6g}); normalise them"
        )


# -- tasks and sources in training


@dataclass(eq=False)
class Task:
    """What is asked in training: a classifier with ``classes`` classes or, with ``classes=None``, a head and a loss.

    Attributes:
        name: its name, unique in the learner.
        classes: the number of classes, or None.
        loss: (output of the head, targets) → scalar; a classifier's gets the logits of all classes that it is trained
            against, and labels as indices into them, or probabilities of the same shape.
        head: the module on top of the shared backbone; a classifier's is made when its first batch arrives.
        offset: the index of its first class among all classes seen.
        class_names: the names of its classes, if it has any.
        sources: who answers it, by name.
    """

    name: str
    classes: int | None
    loss: Callable[[Tensor, Tensor], Tensor]
    head: nn.Module | None
    offset: int
    class_names: tuple[str, ...] | None = None
    sources: "Sources" = field(default_factory=lambda: Sources())

    @property
    def words(self) -> str:
        """The task as errors name it."""
        return f"task {self.name!r}"

    @property
    def finished(self) -> bool:
        """Whether all of its sources have ended."""
        return bool(self.sources) and all(source.finished for source in self.sources.values())

    @property
    def skipped(self) -> int:
        """The number of times that a source was skipped because its loss or gradient was not finite."""
        return sum(source.skipped for source in self.sources.values())

    @property
    def signature(self) -> tuple[str, str] | None:
        """Shapes and types of one sample and target of the first source that has had a batch."""
        return next((source.signature for source in self.sources.values() if source.signature is not None), None)


class Sources(WeakValueDictionary[str, "TaskSource"]):
    """The sources of a task by name.

    They hold the task, and not the task them, so that nothing of a learner outlives it. In a copy of a task, the copies
    of its sources enter themselves.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sources":
        return Sources()


@dataclass(eq=False)
class TaskSource:
    """Who brings the samples of a task; a task that was added alone has one source, of its own name.

    A source whose samples answer several tasks is one of these for each task, named ``source/task``.

    Attributes:
        name: its name, unique in the learner.
        task: the task that its samples answer.
        batch: the name under which its batches come: its own, or the name that it shares with other tasks' parts.
        encoder: the module in front of the backbone; None for none.
        encoder_name: the name of the encoder, or its name and options, if it is one of
            :data:`spcl.encoders.ENCODERS`, which is made when the first batch arrives; else None.
        is_implied: whether it was made with its task; such a source gives way to the first one that is added, unless it
            has had a batch.
        finished: whether it has ended.
        signature: shapes and types of one sample and target, fixed by the first batch.
        skipped: the number of steps in which it was skipped because its loss or gradient was not finite.
        skipped_in_a_row: the number of the latest steps in which it was skipped, one after the other.
    """

    name: str
    task: Task
    encoder: nn.Module | None = None
    encoder_name: str | dict[str, Any] | None = None
    batch: str = ""
    is_implied: bool = False
    finished: bool = False
    signature: tuple[str, str] | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    _kind: object = None  # cache: the kind of the last batch that fitted the signature

    def __post_init__(self) -> None:
        self.batch = self.batch or self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = copy.copy(self)
        for each in fields(self):
            setattr(copied, each.name, copy.deepcopy(getattr(self, each.name), memo))
        copied.task.sources[copied.name] = copied
        return copied

    @property
    def words(self) -> str:
        """The source as errors name it; it is called a task where it has the task's name."""
        if self.name == self.task.name:
            return f"task {self.name!r}"
        return f"source {self.name!r} of task {self.task.name!r}"

    def check_batch(self, x: Inputs, y: Tensor) -> None:
        """Refuse a batch that cannot be trained on; its labels are left to :func:`check_labels_of_sources`."""
        if self.finished:
            raise TaskError(f"{self.words} is finished; start it again with add_source({self.batch!r})")
        count, kind = kind_of_pair(x, y)
        self._check_sizes(count, x, y)
        if self.signature is not None and kind != self._kind:
            self._check_signature(describe(x, 1), describe(y, 1))
            self._kind = kind

    def check_samples(self, x: Inputs, y: Tensor) -> None:
        """Refuse samples that cannot be evaluated on; labels may be classes where probabilities are learned."""
        self._check_sizes(number_of_samples(x), x, y)
        if self.signature is not None:
            self._check_signature(describe(x, 1), describe(y, 1) if self.task.classes is None else self.signature[1])
        self.check_targets(y)

    def check_targets(self, y: Tensor) -> None:
        """Refuse what is neither labels nor probabilities of a classifier's classes."""
        if self.task.classes is not None:
            check_targets(self.words, y, "classification", self.task.classes)

    def _check_sizes(self, count: int, x: Inputs, y: Tensor) -> None:
        if not count:
            shape = f"x has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"x is {describe(x)}"
            raise TaskError(f"{self.words}: the batch is empty ({shape}); leave it out instead")
        if y.ndim == 0 or y.shape[0] != count:
            raise TaskError(f"{self.words}: {count} inputs but targets of shape {tuple(y.shape)}")

    def _check_signature(self, *signature: str) -> None:
        if self.signature is not None and signature != self.signature:
            raise TaskError(
                f"{self.words}: its samples are {' with targets '.join(self.signature)}, "
                f"but this batch has {' with targets '.join(signature)}; convert it (pad sequences to one length), "
                f"or add a source or task for such samples"
            )
