"""The schema of a task: what its targets are, and whether a batch fits."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from torch import Tensor

from spcl.batches import Batch, Inputs, describe, map_leaves, number_of_samples
from spcl.errors import DataError, TaskError

__all__ = ["Kind", "Schema"]

Kind = Literal["classification", "regression", "multilabel"]

MOST_OUTPUTS = 100_000  # the head of a task that a message announces must fit into memory
INTEGERS = frozenset(
    (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64)
)
TOLERANCE = 1e-4  # of the sum of probabilities, as the learner has it


class Schema(BaseModel):
    """What the targets of a task are.

    Attributes:
        kind: classes, numbers, or any number of labels per sample.
        classes: the number of classes, labels or numbers, or their names.

    >>> schema = Schema.of(classes=["cat", "dog"])
    >>> x, y = schema.fit((torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0, 1])), inputs="float32[4]")
    >>> x.dtype
    torch.float32
    >>> schema.fit((torch.zeros(2, 4), torch.tensor([0, 2])), inputs="float32[4]")
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: there are 2 classes, but the batch has label 2; announce as many classes as there are, or fix
    the labels
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = "classification"
    classes: int | tuple[str, ...]

    @field_validator("classes")
    @classmethod
    def _possible(cls, classes: int | tuple[str, ...]) -> int | tuple[str, ...]:
        count = classes if isinstance(classes, int) else len(classes)
        if not 1 <= count <= MOST_OUTPUTS:
            raise ValueError(f"give 1 to {MOST_OUTPUTS}")
        if not isinstance(classes, int) and (len(set(classes)) < count or not all(classes)):
            raise ValueError("give different names that are not empty")
        return classes

    @classmethod
    def of(cls, kind: str = "classification", classes: int | Sequence[str] | None = None) -> Self:
        """Return a checked schema; a regression has one output unless ``classes`` says otherwise."""
        if classes is None and kind == "regression":
            classes = 1
        return cls.parsed(
            {"kind": kind, "classes": classes if classes is None or isinstance(classes, int) else (*classes,)}
        )

    @classmethod
    def parsed(cls, values: Any) -> Self:
        """Return the schema that plain data describes, or raise a :class:`TaskError`."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            wrong = "; ".join(
                f"{detail['loc'][0] if detail['loc'] else 'it'}: {detail['msg']}" for detail in error.errors()
            )
            raise TaskError(
                f"a task cannot be {values!r:.120} ({wrong}); give kind (classification, regression or multilabel) and "
                f"classes, a number or names"
            ) from None

    @classmethod
    def inferred(cls, batch: Batch) -> Self:
        """Return the schema of a batch whose targets say enough: numbers, or labels of which a sample may have several.

        >>> Schema.inferred((torch.zeros(2, 4), torch.zeros(2, 3)))
        Schema(kind='regression', classes=3)
        """
        y = batch[1]
        if y.is_floating_point() and y.dim() <= 2:
            return cls.of("regression", y.shape[1] if y.dim() == 2 else 1)
        if y.dim() == 2:
            return cls.of("multilabel", y.shape[1])
        raise DataError(
            f"the number of classes is not known from targets {describe(y, 1)}; announce the task, or configure classes"
        )

    def __str__(self) -> str:
        """Return the kind and its size in words.

        >>> str(Schema.of(classes=["cat", "dog"])), str(Schema.of("regression", 1))
        ('2 classes', 'regression with 1 output')
        """
        if self.kind == "classification":
            return f"{self.outputs} classes"
        return f"{self.kind} with {self.outputs} output{'s' if self.outputs > 1 else ''}"

    @property
    def outputs(self) -> int:
        """The number of classes, labels or numbers."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes; empty where they have none."""
        return () if isinstance(self.classes, int) else self.classes

    def fit(self, batch: Batch, inputs: str) -> Batch:
        """Return the batch in the types that a learner needs, or raise a :class:`DataError` that says what is wrong.

        Args:
            batch: inputs and targets.
            inputs: type and shape of one sample, as :func:`spcl.batches.describe` gives them.
        """
        x, y = batch
        if y.dim() == 0 or not number_of_samples(x) == y.shape[0] > 0:
            raise DataError(f"the inputs are {describe(x)} and the targets {describe(y)}; give one target per sample")
        return _fitting_inputs(x, inputs), getattr(self, f"_{self.kind}")(y)

    def _classification(self, y: Tensor) -> Tensor:
        if y.is_floating_point() and y.shape[1:] == (self.outputs,):
            return _probabilities(y)
        if y.dim() != 1 or y.dtype not in INTEGERS:
            raise DataError(f"the targets are {describe(y, 1)}; give one whole number per sample, or probabilities")
        labels = y.tolist()  # reductions of PyTorch would give Python's lock away, to a thread that trains
        lowest, highest = min(labels), max(labels)
        if lowest < 0 or highest >= self.outputs:
            raise DataError(
                f"there are {self.outputs} classes, but the batch has label {lowest if lowest < 0 else highest}; "
                f"announce as many classes as there are, or fix the labels"
            )
        return y if y.dtype == torch.int64 else y.to(torch.int64)

    def _regression(self, y: Tensor) -> Tensor:
        y = y.unsqueeze(1) if y.dim() == 1 else y
        if y.is_complex() or y.dtype == torch.bool or y.shape[1:] != (self.outputs,):
            raise DataError(f"the targets are {describe(y, 1)}; give {self.outputs} number(s) per sample")
        return y.to(torch.float32)

    def _multilabel(self, y: Tensor) -> Tensor:
        if y.is_complex() or y.shape[1:] != (self.outputs,):
            raise DataError(f"the targets are {describe(y, 1)}; give {self.outputs} zeros or ones per sample")
        if not bool(((y == 0) | (y == 1)).all()):
            raise DataError("the targets hold other values than 0 and 1; give 1 where a label is present")
        return y.to(torch.float32)


def _fitting_inputs(x: Inputs, expected: str) -> Inputs:
    """Return inputs of the expected type and shape; NumPy's default of 64 bits is converted."""
    if describe(x, 1) == expected:
        return x
    x = map_leaves(lambda leaf: leaf.float() if leaf.dtype == torch.float64 else leaf, x)
    if (found := describe(x, 1)) != expected:
        raise DataError(f"a sample is {found:.200}, and the learner expects {expected}; convert it")
    return x


def _probabilities(y: Tensor) -> Tensor:
    sums = y.sum(dim=1, dtype=torch.float64)
    if not bool(((sums - 1.0).abs() <= TOLERANCE).all()) or not bool((y >= 0.0).all()):
        raise DataError("the probabilities of a sample are negative or do not add up to 1; normalise them")
    return y.to(torch.float32)
