"""What a data set holds: samples of classes that are split into tasks, or samples of several sources."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl._util.registry import Registry
from spcl.batches import Inputs, leaves, map_leaves, number_of_samples
from spcl.errors import DataError, SpclError
from spcl.tasks import Kind, check_targets

TOKEN_TYPES = (torch.int32, torch.int64)
"""Types of token sequences."""


@dataclass(frozen=True, eq=False, repr=False)
class ImageData:
    """A labelled data set, split into training and test samples.

    Images are uint8 N×C×H×W and converted to floats by the model; custom data may also be floating point, N×F features
    or N×C×H×W images, or integer token sequences N×L. Labels are int64 indices into ``class_names``.

    >>> images = torch.zeros(4, 1, 28, 28, dtype=torch.uint8)
    >>> labels = torch.tensor([0, 1, 0, 1])
    >>> ImageData("tiny", images, labels, images[:2], labels[:2], ("zero", "one"))
    ImageData('tiny': 4 + 2 samples of 1×28×28, 2 classes)
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            check_samples(f"{self.name}, {split}", x)
            check_labels(f"{self.name}, {split}", y, len(x), len(self.class_names))
        train, test = self.train_x, self.test_x
        if (train.dtype, train.shape[1:]) != (test.dtype, test.shape[1:]):
            raise DataError(
                f"{self.name}: training samples are {train.dtype} {tuple(train.shape[1:])}, "
                f"test samples {test.dtype} {tuple(test.shape[1:])}; give both the same type and shape"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample: (C, H, W), (F,) for features or (L,) for tokens."""
        return tuple(self.train_x.shape[1:])

    @property
    def train_samples(self) -> int:
        """Number of training samples."""
        return len(self.train_x)

    @property
    def test_samples(self) -> int:
        """Number of test samples."""
        return len(self.test_x)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def __repr__(self) -> str:
        size = "×".join(str(extent) for extent in self.shape)
        counts = f"{len(self.train_x)} + {len(self.test_x)} samples of {size}"
        return f"ImageData({self.name!r}: {counts}, {self.classes} classes)"


def check_samples(what: str, x: Tensor) -> None:
    """Raise an error unless x holds images, features or tokens, at least one of them."""
    if x.dtype == torch.uint8:
        fits, expected = x.ndim == 4, "uint8 images must be N×C×H×W"
    elif x.dtype in TOKEN_TYPES:
        fits, expected = x.ndim == 2, "integers are token sequences N×L, and images must be uint8"
    else:
        fits, expected = (
            x.is_floating_point() and x.ndim >= 2,
            "samples must be uint8 images, floating-point features or integer token sequences",
        )
    if not fits:
        raise DataError(f"{what}: {expected}, found {x.dtype} of shape {tuple(x.shape)}")
    if x.numel() == 0:
        raise DataError(f"{what}: no samples (shape {tuple(x.shape)}); give at least one")
    if x.dtype in TOKEN_TYPES and int(x.min()) < 0:
        raise DataError(f"{what}: token sequences hold {int(x.min())}; give tokens of at least 0")


def check_labels(what: str, y: Tensor, samples: int, classes: int) -> None:
    """Raise an error unless y holds a label 0..classes-1 of every sample."""
    if y.dtype != torch.int64 or y.ndim != 1:
        raise DataError(f"{what}: labels must be a vector of int64, found {y.dtype} of shape {tuple(y.shape)}")
    if len(y) != samples:
        raise DataError(f"{what}: {samples} samples but {len(y)} labels; give one label per sample")
    lowest, highest = int(y.min()), int(y.max())
    if lowest < 0 or highest >= classes:
        raise DataError(f"{what}: labels must be 0..{classes - 1}, found {lowest if lowest < 0 else highest}")


# -- several sources


@dataclass(frozen=True, eq=False, repr=False)
class SourceSamples:
    """Training and test samples of one source.

    Inputs are uint8 images N×C×H×W, floating-point features of any shape, integer token sequences N×L, or a dict or
    tuple of tensors with one first dimension, such as tokens with a mask.

    Args:
        name: The source's name.
        kind: ``"classification"``, ``"regression"`` or ``"multilabel"``.
        train_x: Inputs.
        train_y: Classification: int64 labels 0..classes-1, or floating-point probabilities N×classes (soft labels).
            Regression: floating-point numbers, N or N×outputs; a vector becomes N×1. Multi-label: zeros and ones of any
            type, N×outputs. Stored as float32 unless they are labels.
        test_x: Inputs of the same type and shape as ``train_x``.
        test_y: Targets of the same form as ``train_y``; for a classification always labels.
        class_names: Names of the classes or outputs; needed for a classification.
        task: The question that the source answers, by name; several sources may answer the same. By default the source
            is a task of its own.
        unseen: Whether the source is held out: never trained, only evaluated on its test samples.
        scale: For a regression, what an error of 1 is in the target's unit.
        train_times: When the training samples were taken, as int64 ticks of a clock that all sources share, in order;
            None where there is no common clock.
        test_times: Likewise of the test samples; needed with ``train_times``.

    >>> x = torch.zeros(6, 4)
    >>> SourceSamples("speed", "regression", x, torch.rand(6), x[:2], torch.rand(2))
    SourceSamples('speed': regression of 1 output, 6 + 2 samples of 4)
    """

    name: str
    kind: Kind
    train_x: Inputs
    train_y: Tensor
    test_x: Inputs
    test_y: Tensor
    class_names: tuple[str, ...] = ()
    task: str | None = None
    unseen: bool = False
    scale: float = 1.0
    train_times: Tensor | None = None
    test_times: Tensor | None = None

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
        if self.task == "":
            raise DataError(f"{self.name}: the task that the source answers has no name; give one, or None")
        if self.scale != 1.0 and not (self.kind == "regression" and 0.0 < self.scale < math.inf):
            raise DataError(f"{self.name}: scale is {self.scale} for a {self.kind}; a regression needs a number > 0")
        if (self.train_times is None) != (self.test_times is None):
            raise DataError(f"{self.name}: give the times of training and test samples together, or neither")
        for split, times, y in (("train", self.train_times, self.train_y), ("test", self.test_times, self.test_y)):
            if times is not None:
                _check_times(f"{self.name}, {split}", times, len(y))

    @property
    def task_name(self) -> str:
        """The name of the task that the source answers."""
        return self.name if self.task is None else self.task

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
    def class_counts(self) -> tuple[int, ...]:
        """How many training samples every class or label has; empty for a regression and for soft labels."""
        if self.kind == "multilabel":
            return tuple(self.train_y.sum(dim=0).long().tolist())
        if self.kind == "regression" or self.train_y.is_floating_point():
            return ()
        return tuple(torch.bincount(self.train_y, minlength=self.outputs).tolist())

    @property
    def classes(self) -> int | None:
        """Number of classes of a classification, None for other kinds."""
        return len(self.class_names) if self.kind == "classification" else None

    def __repr__(self) -> str:
        noun = "class" if self.kind == "classification" else "output"
        plural = "" if self.outputs == 1 else "es" if noun == "class" else "s"
        counts = f"{number_of_samples(self.train_x)} + {number_of_samples(self.test_x)}"
        what = f"{self.kind} of {self.outputs} {noun}{plural}"
        return f"SourceSamples({self.name!r}: {what}, {counts} samples of {describe_inputs(self.train_x)})"


@dataclass(frozen=True, eq=False, repr=False)
class SourceData:
    """A data set of several sources, whose samples may differ in kind and shape.

    A source is a task of its own, or answers a task that it shares with others; then they have the same kind, outputs
    and scale, and at least one of them is trained.

    >>> x = torch.zeros(6, 4)
    >>> speed = SourceSamples("speed", "regression", x, torch.rand(6), x[:2], torch.rand(2))
    >>> signs = SourceSamples("signs", "multilabel", x, torch.ones(6, 3), x[:2], torch.ones(2, 3))
    >>> SourceData("car", (speed, signs))
    SourceData('car': 2 sources, 12 + 4 samples)
    """

    name: str
    sources: tuple[SourceSamples, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources:
            raise DataError(f"{self.name}: there is no source; give at least one")
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{self.name}: {names.count(name)} sources are named {name!r}; rename all but one")
        self._check_tasks()

    def _check_tasks(self) -> None:
        tasks: dict[str, list[SourceSamples]] = {}
        for source in self.sources:
            tasks.setdefault(source.task_name, []).append(source)
        for task, (first, *others) in tasks.items():
            for other in others:
                asked = [(each.kind, each.outputs, each.class_names, each.scale) for each in (first, other)]
                if asked[0] != asked[1]:
                    raise DataError(
                        f"{self.name}: sources {first.name!r} and {other.name!r} answer the task {task!r}, but "
                        f"differ in kind, classes, outputs or scale; give them the same, or tasks of their own"
                    )
            if all(source.unseen for source in (first, *others)):
                raise DataError(f"{self.name}: all sources of the task {task!r} are unseen; train at least one")

    @property
    def trained(self) -> tuple[SourceSamples, ...]:
        """The sources that are trained; others are held out."""
        return tuple(source for source in self.sources if not source.unseen)

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
        """Number of classes of all tasks together."""
        return sum({source.task_name: source.classes or 0 for source in self.sources}.values())

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
        raise DataError(f"{what}: the tensors of the samples have {counts} entries; give each the same number")
    if not counts[0]:
        raise DataError(f"{what}: no samples; give at least one")
    return None


def _check_targets(what: str, kind: Kind, y: Tensor, samples: int, classes: int, *, soft: bool) -> Tensor:
    """Return the targets as they are trained on, or raise an error if they are not of this kind."""
    if kind == "classification":
        if not classes:
            raise DataError(f"{what}: a classification needs the names of its classes; give class_names")
        if not (soft and y.is_floating_point()):
            check_labels(what, y, samples, classes)
            return y
    if len(y) != samples:
        raise DataError(f"{what}: {samples} samples but {len(y)} targets; give one target per sample")
    if kind == "regression" and y.ndim == 1:
        y = y[:, None]
    if y.ndim != 2 or not y.shape[1]:
        raise DataError(f"{what}: targets of a {kind} must be N×outputs, found {y.dtype} of shape {tuple(y.shape)}")
    if not bool(torch.isfinite(y).all()):
        raise DataError(f"{what}: targets hold NaN or infinite values; replace them first")
    targets = y.float() if kind == "multilabel" else y
    check_targets(what, targets, kind, classes if kind == "classification" else y.shape[1], DataError)
    return targets.float()


def _check_times(what: str, times: Tensor, samples: int) -> None:
    if times.dtype != torch.int64 or times.shape != (samples,):
        raise DataError(
            f"{what}: times must be a vector of int64, one for each of {samples} samples, "
            f"found {times.dtype} of shape {tuple(times.shape)}"
        )
    if bool((times[1:] < times[:-1]).any()):
        raise DataError(f"{what}: times decrease; sort the samples by time")


# -- holding out a part of the samples

Indices = NDArray[np.int64]


@overload
def hold_out(data: ImageData, fraction: float) -> ImageData: ...


@overload
def hold_out(data: SourceData, fraction: float) -> SourceData: ...


def hold_out(data: ImageData | SourceData, fraction: float) -> ImageData | SourceData:
    """Replace the test data by a fraction of every class of the training data, chosen by a fixed permutation.

    Of a source without classes it is a fraction of all its samples.
    """
    if isinstance(data, SourceData):
        return SourceData(data.name, tuple(_held_out_source(source, fraction) for source in data.sources))
    held = _held_out(data.train_y, fraction)
    x, y = data.train_x, data.train_y
    return replace(data, train_x=x[~held], train_y=y[~held], test_x=x[held], test_y=y[held])


def _held_out_source(source: SourceSamples, fraction: float) -> SourceSamples:
    y = source.train_y
    labels = y.argmax(dim=1) if source.kind == "classification" and y.ndim == 2 else y
    held = _held_out(labels if source.kind == "classification" else torch.zeros(len(y), dtype=torch.int64), fraction)
    return replace(
        source,
        train_x=map_leaves(lambda part: part[~held], source.train_x),
        train_y=y[~held],
        test_x=map_leaves(lambda part: part[held], source.train_x),
        test_y=(labels if source.kind == "classification" else y)[held],
        train_times=None if source.train_times is None else source.train_times[~held],
        test_times=None if source.train_times is None else source.train_times[held],
    )


def _held_out(labels: Tensor, fraction: float) -> Tensor:
    """Return a mask of the samples that are held out."""
    position = np.argsort(np.random.default_rng(0).permutation(len(labels)))
    mask = stratified_mask(labels.numpy(), fraction, lambda members: members[position[members].argsort()])
    if not mask.any():
        raise SpclError(
            f"validation = {fraction} of {len(labels)} samples leaves nothing to validate on; choose a larger fraction"
        )
    return torch.from_numpy(mask)


def stratified_mask(
    labels: NDArray[np.generic], fraction: float, shuffle: Callable[[Indices], Indices], *, nonempty: bool = False
) -> NDArray[np.bool_]:
    """Return a mask of a fraction of the samples of every class.

    Args:
        labels: The class of each sample.
        fraction: The fraction of each class, rounded to whole samples.
        shuffle: Permutes the indices of a class; the first of them are chosen.
        nonempty: Choose at least one sample of each class, and leave at least one.

    >>> stratified_mask(np.array([0, 0, 1, 1, 1, 1]), 0.5, lambda members: members)
    array([ True, False,  True,  True, False, False])
    """
    mask = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = shuffle(np.flatnonzero(labels == label))
        count = round(len(members) * fraction)
        mask[members[: min(max(1, count), len(members) - 1) if nonempty else count]] = True
    return mask


DATA: Registry[Callable[..., ImageData | SourceData]] = Registry("data set", keywords=("data_dir",))
"""Functions that make a data set; their parameters are its options, except ``data_dir``, the folder of data files."""
