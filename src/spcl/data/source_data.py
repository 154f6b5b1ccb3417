"""A data set of several sources, each of them a task of its own: classification, regression or multi-label."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from spcl.batches import Inputs, leaves, number_of_samples
from spcl.data.image_data import check_labels, check_samples
from spcl.errors import DataError

__all__ = ["Kind", "Source", "SourceData", "describe_inputs"]

Kind = Literal["classification", "regression", "multilabel"]
"""What the targets of a source are."""


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """Training and test samples of one task.

    Inputs are uint8 images N×C×H×W, floating-point features of any shape, integer token sequences N×L, or a dict or
    tuple of tensors with one first dimension, such as tokens with a mask.

    Args:
        name: The task's name.
        kind: ``"classification"``, ``"regression"`` or ``"multilabel"``.
        train_x: Inputs.
        train_y: Classification: int64 labels 0..classes-1, or floating-point probabilities N×classes (soft labels).
            Regression: floating-point numbers, N or N×outputs; a vector becomes N×1. Multi-label: zeros and ones of any
            type, N×outputs. Stored as float32 unless they are labels.
        test_x: Inputs like those of training.
        test_y: Targets like those of training; of a classification always labels.
        class_names: Names of the classes or outputs; needed for a classification.

    >>> x = torch.zeros(6, 4)
    >>> Source("speed", "regression", x, torch.rand(6), x[:2], torch.rand(2))
    Source('speed': regression of 1 output, 6 + 2 samples of 4)
    """

    name: str
    kind: Kind
    train_x: Inputs
    train_y: Tensor
    test_x: Inputs
    test_y: Tensor
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise DataError(f"{self.name}: there is no kind {self.kind!r}; choose one of {', '.join(get_args(Kind))}")
        for split in ("train", "test"):
            what, x, y = f"{self.name}, {split}", getattr(self, f"{split}_x"), getattr(self, f"{split}_y")
            _check_inputs(what, x)
            y = _check_targets(what, self.kind, y, number_of_samples(x), len(self.class_names), soft=split == "train")
            object.__setattr__(self, f"{split}_y", y)
        train, test = describe_inputs(self.train_x, types=True), describe_inputs(self.test_x, types=True)
        if train != test:
            raise DataError(
                f"{self.name}: training samples are {train}, test samples {test}; give both the same type and shape"
            )
        if self.kind != "classification":
            self._check_outputs()

    def _check_outputs(self) -> None:
        outputs, tested = self.train_y.shape[1], self.test_y.shape[1]
        if outputs != tested:
            raise DataError(f"{self.name}: {outputs} outputs in training, but {tested} in the test; give both the same")
        if self.class_names and len(self.class_names) != outputs:
            raise DataError(f"{self.name}: {outputs} outputs, but {len(self.class_names)} names; give one per output")

    @property
    def outputs(self) -> int:
        """Number of classes, labels or numbers that are predicted."""
        return len(self.class_names) if self.kind == "classification" else self.train_y.shape[1]

    @property
    def classes(self) -> int | None:
        """Number of classes of a classification, None for other kinds."""
        return len(self.class_names) if self.kind == "classification" else None

    def __repr__(self) -> str:
        noun = "class" if self.kind == "classification" else "output"
        plural = "" if self.outputs == 1 else "es" if noun == "class" else "s"
        counts = f"{number_of_samples(self.train_x)} + {number_of_samples(self.test_x)}"
        what = f"{self.kind} of {self.outputs} {noun}{plural}"
        return f"Source({self.name!r}: {what}, {counts} samples of {describe_inputs(self.train_x)})"


@dataclass(frozen=True, eq=False, repr=False)
class SourceData:
    """A data set whose sources are the tasks; their samples may differ in kind and shape.

    >>> x = torch.zeros(6, 4)
    >>> speed = Source("speed", "regression", x, torch.rand(6), x[:2], torch.rand(2))
    >>> signs = Source("signs", "multilabel", x, torch.ones(6, 3), x[:2], torch.ones(2, 3))
    >>> SourceData("car", (speed, signs))
    SourceData('car': 2 sources, 12 + 4 samples)
    """

    name: str
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources:
            raise DataError(f"{self.name}: there is no source; give at least one")
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{self.name}: {names.count(name)} sources are named {name!r}; rename all but one")

    @property
    def train_samples(self) -> int:
        """Number of training samples of all sources together."""
        return sum(len(source.train_y) for source in self.sources)

    @property
    def test_samples(self) -> int:
        """Number of test samples of all sources together."""
        return sum(len(source.test_y) for source in self.sources)

    @property
    def classes(self) -> int:
        """Number of classes of all classifications together."""
        return sum(source.classes or 0 for source in self.sources)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, where all sources have tensors of one shape; otherwise empty."""
        shapes = {tuple(part.shape[1:]) for source in self.sources for part in leaves(source.train_x).values()}
        tensors = all(isinstance(source.train_x, Tensor) for source in self.sources)
        return shapes.pop() if tensors and len(shapes) == 1 else ()

    def __repr__(self) -> str:
        train, test = (
            sum(len(y) for y in ys) for ys in zip(*((s.train_y, s.test_y) for s in self.sources), strict=True)
        )
        return f"SourceData({self.name!r}: {len(self.sources)} sources, {train} + {test} samples)"


def describe_inputs(x: Inputs, *, types: bool = False) -> str:
    """Describe one sample by its shape, and perhaps by its type.

    >>> describe_inputs({"input_ids": torch.zeros(3, 8), "attention_mask": torch.ones(3, 8)})
    'input_ids 8, attention_mask 8'
    >>> describe_inputs(torch.zeros(3, 1, 28, 28), types=True)
    'float32 1×28×28'
    """

    def describe(part: Tensor) -> str:
        shape = "×".join(map(str, part.shape[1:])) or "1"
        return f"{str(part.dtype).removeprefix('torch.')} {shape}" if types else shape

    if isinstance(x, dict):
        return ", ".join(f"{name} {describe(part)}" for name, part in x.items())
    return ", ".join(map(describe, leaves(x).values()))


def _check_inputs(what: str, x: Inputs) -> None:
    if isinstance(x, Tensor):
        return check_samples(what, x)
    if not isinstance(x, dict | tuple) or not x or not all(isinstance(part, Tensor) for part in leaves(x).values()):
        raise DataError(f"{what}: samples must be a tensor, or a dict or tuple of tensors, found {type(x).__name__}")
    counts = [part.shape[0] if part.ndim else 0 for part in leaves(x).values()]
    if len(set(counts)) != 1:
        raise DataError(f"{what}: the tensors of the samples have {counts} entries; give every one as many")
    if not counts[0]:
        raise DataError(f"{what}: no samples; give at least one")
    return None


def _check_targets(what: str, kind: Kind, y: Tensor, samples: int, classes: int, *, soft: bool) -> Tensor:
    """Return the targets as they are trained on, or raise an error if they are not of this kind."""
    if kind == "classification" and not classes:
        raise DataError(f"{what}: a classification needs the names of its classes; give class_names")
    if kind == "classification" and not (soft and y.is_floating_point()):
        check_labels(what, y, samples, classes)
        return y
    if len(y) != samples:
        raise DataError(f"{what}: {samples} samples but {len(y)} targets; give one target per sample")
    if kind == "regression" and y.ndim == 1:
        y = y[:, None]
    if y.ndim != 2 or not y.shape[1] or (kind != "multilabel" and not y.is_floating_point()):
        expected = {"regression": "floating-point numbers, N or N×outputs", "multilabel": "zeros and ones, N×outputs"}
        wanted = expected.get(kind, "labels, or floating-point probabilities N×classes")
        raise DataError(f"{what}: targets of a {kind} must be {wanted}, found {y.dtype} of shape {tuple(y.shape)}")
    _check_values(what, kind, y, classes)
    return y.float()


def _check_values(what: str, kind: Kind, y: Tensor, classes: int) -> None:
    if not bool(torch.isfinite(y).all()):
        raise DataError(f"{what}: targets hold NaN or infinite values; replace them first")
    if kind == "multilabel" and not bool(((y == 0) | (y == 1)).all()):
        wrong = y[(y != 0) & (y != 1)][0].item()
        raise DataError(f"{what}: targets of a multilabel source must be 0 or 1, found {wrong:.4g}")
    if kind == "classification":
        if y.shape[1] != classes:
            raise DataError(
                f"{what}: soft labels of {y.shape[1]} classes, but {classes} class names; give one per class"
            )
        if bool((y < 0).any()) or bool(((y.sum(dim=1) - 1).abs() > 1e-4).any()):
            raise DataError(f"{what}: soft labels must be probabilities that add up to 1 for every sample")
