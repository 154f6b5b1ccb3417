"""A data set in memory: training and test samples with labels 0..classes-1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spcl.errors import DataError

__all__ = ["TOKEN_TYPES", "ImageData", "check_labels", "check_samples"]

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
