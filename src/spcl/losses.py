"""Losses by name: (output, targets) → scalar, made for a task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spcl._util.registry import Registry
from spcl.errors import SpclError
from spcl.tasks import Kind, TaskDescription

__all__ = ["LOSSES", "BinaryCrossEntropy", "CrossEntropy", "Loss", "TaskDescription"]

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: Registry[Callable[..., Loss]] = Registry("loss", positional=1)
"""Losses by name: factory(:class:`TaskDescription`, \\*\\*options) → loss.

>>> loss = LOSSES.make("huber", TaskDescription("speed", "regression"))
>>> loss(torch.tensor([[0.5]]), torch.tensor([[0.0]]))
tensor(0.1250)
"""


@dataclass(frozen=True)
class CrossEntropy:
    r"""Cross-entropy of a classifier with label smoothing and class weights, against labels or probabilities.

    It is :func:`torch.nn.functional.cross_entropy` over all logits given. Class weights belong to the task's own
    classes; the classes of other tasks, which class-incremental logits cover as well, have weight 1.

    Args:
        label_smoothing: between 0 and 1, the part of every target that is spread evenly over all classes.
        class_weights: one per class of the task; None weighs all equally.

    >>> loss = CrossEntropy(class_weights=(1.0, 3.0))
    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    >>> loss(logits, torch.tensor([0, 1]))
    tensor(0.4082)
    """

    label_smoothing: float = 0.0
    class_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise SpclError(f"label_smoothing is {self.label_smoothing}; give a number from 0 to 1")
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", _non_negative("class_weights", self.class_weights))

    def __call__(
        self, logits: Tensor, targets: Tensor, own: slice | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """Return the loss.

        Args:
            logits: of shape (samples, classes).
            targets: labels, or probabilities of the same shape as the logits.
            own: the columns of the task's own classes, by default all.
            offsets: added to the logits; a class whose offset is the logarithm of w gets w times as much of what label
                smoothing spreads, or smoothing would raise what offsets lower.
        """
        weights = None
        if self.class_weights is not None:
            start = 0 if own is None else own.start
            weights = _vector(tuple(self.class_weights), start, logits.shape[1], logits.device, logits.dtype)
        if offsets is None:
            return functional.cross_entropy(logits, targets, weights, label_smoothing=self.label_smoothing)
        plain = functional.cross_entropy(logits + offsets, targets, weights)
        if not self.label_smoothing:
            return plain
        spread = offsets.softmax(dim=0) if weights is None else offsets.softmax(dim=0) * weights
        counted = len(targets) if weights is None or targets.is_floating_point() else weights[targets].sum()
        smooth = -((logits + offsets).log_softmax(dim=1) @ spread).sum() / counted
        return torch.lerp(plain, smooth, self.label_smoothing)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Mean binary cross-entropy for samples with any number of labels; targets are 0 or 1, of any type.

    Args:
        pos_weight: factor of the loss of labels that are present, one or one per label.

    >>> loss = BinaryCrossEntropy(pos_weight=3.0)
    >>> loss(torch.zeros(1, 2), torch.tensor([[1, 0]]))
    tensor(1.3863)
    """

    pos_weight: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        weights = self.pos_weight if isinstance(self.pos_weight, Sequence) else [self.pos_weight]
        object.__setattr__(self, "pos_weight", _non_negative("pos_weight", weights))

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of logits of shape (samples, labels)."""
        assert isinstance(self.pos_weight, tuple)
        weights = _vector(self.pos_weight, 0, len(self.pos_weight), output.device, output.dtype)
        return functional.binary_cross_entropy_with_logits(output, targets.to(output.dtype), pos_weight=weights)


@LOSSES.register("cross-entropy")
def _cross_entropy(
    task: TaskDescription,
    *,
    label_smoothing: float = 0.0,
    class_weights: Any = None,
) -> Loss:
    """For classification; ``label_smoothing`` is 0 to 1, ``class_weights`` ``balanced`` or weights by class name."""
    _check_kind(task, "cross-entropy", "classification")
    if class_weights is None:
        return CrossEntropy(label_smoothing)
    weights = _balanced(task) if class_weights == "balanced" else _named(task, class_weights)
    return CrossEntropy(label_smoothing, weights)


@LOSSES.register("mse")
def _mse(task: TaskDescription) -> Loss:
    """For regression: the mean squared error."""
    _check_kind(task, "mse", "regression")
    return functional.mse_loss


@LOSSES.register("l1")
def _l1(task: TaskDescription) -> Loss:
    """For regression: the mean absolute error."""
    _check_kind(task, "l1", "regression")
    return functional.l1_loss


@LOSSES.register("huber")
def _huber(task: TaskDescription, *, delta: float = 1.0) -> Loss:
    """For regression: squared for errors up to ``delta``, and linear beyond."""
    _check_kind(task, "huber", "regression")
    if not delta > 0.0:
        raise SpclError(f"delta of the loss 'huber' is {delta}; give a positive number")
    return partial(functional.huber_loss, delta=delta)


@LOSSES.register("binary-cross-entropy")
def _binary_cross_entropy(task: TaskDescription, *, pos_weight: float | Sequence[float] = 1.0) -> Loss:
    """For multi-label tasks; ``pos_weight`` weighs labels that are present, by one number or a list with one each."""
    _check_kind(task, "binary-cross-entropy", "multilabel")
    if isinstance(pos_weight, Sequence) and task.classes not in (None, len(pos_weight)):
        raise SpclError(f"task {task.name!r} has {task.classes} labels, but {len(pos_weight)} numbers in pos_weight")
    return BinaryCrossEntropy(pos_weight)


def _check_kind(task: TaskDescription, loss: str, kind: Kind) -> None:
    if task.kind != kind:
        raise SpclError(f"task {task.name!r} is a {task.kind} task, but the loss {loss!r} is for {kind}")


def _balanced(task: TaskDescription) -> tuple[float, ...]:
    """Return weights inversely proportional to the class counts, whose mean over the samples is 1."""
    counts = task.class_counts
    if counts is None:
        raise SpclError(
            f"the class counts of task {task.name!r} are not known, so its class weights cannot be 'balanced'; "
            f"give them by class name"
        )
    if 0 in counts:
        raise SpclError(
            f"class {counts.index(0)} of task {task.name!r} has no samples, so its class weights cannot be 'balanced'; "
            f"give them by class name"
        )
    return tuple(sum(counts) / (len(counts) * count) for count in counts)


def _named(task: TaskDescription, weights: Mapping[str, float]) -> tuple[float, ...]:
    """Return the weight of every class: the one given for its name, or 1."""
    if not isinstance(weights, Mapping):
        wanted = "'balanced' or a mapping from class name to weight"
        order = "" if isinstance(weights, str) else ", as a task's classes may be in any order"
        raise SpclError(f"class_weights is {weights!r}; give {wanted}{order}")
    if task.class_names is None:
        raise SpclError(
            f"the class names of task {task.name!r} are not known, so class_weights cannot name them; give 'balanced'"
        )
    by_name = dict(zip(map(str, weights), _non_negative("class_weights", list(weights.values())), strict=True))
    return tuple(by_name.get(name, 1.0) for name in task.class_names)


def _non_negative(name: str, weights: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(weight) for weight in weights)
    if not values or not all(0.0 <= weight < float("inf") for weight in values):
        raise SpclError(f"{name} is {list(weights)}; give finite numbers that are not negative")
    return values


@lru_cache(maxsize=256)  # copying to a GPU waits for it
def _vector(weights: tuple[float, ...], start: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a vector of this width with the weights from ``start`` on, and 1 elsewhere."""
    before, after = [1.0] * start, [1.0] * (width - start - len(weights))
    with torch.inference_mode(False):  # else a tensor kept from an evaluation could not be used in training
        return torch.tensor([*before, *weights, *after], device=device, dtype=dtype)
