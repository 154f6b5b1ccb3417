"""CIFAR-10 and CIFAR-100, independent of the file format."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spcl.data.archives import Archive
from spcl.data.image_data import ImageData
from spcl.errors import DataError

__all__ = ["CIFAR10", "CIFAR100", "PIXELS", "Batch", "Cifar", "assemble"]

PIXELS = 3 * 32 * 32
Batch = tuple[np.ndarray, np.ndarray]
"""Pixels, uint8 N×3072 (red, green, blue planes), and N labels."""


@dataclass(frozen=True)
class Cifar:
    """One of the two sets: its number of classes and the names of its batch files (without ``.bin``)."""

    classes: int
    train: tuple[str, ...]
    test: str


CIFAR10 = Cifar(10, tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR100 = Cifar(100, ("train",), "test")


def assemble(
    archive: Archive, name: str, cifar: Cifar, suffix: str, read_batch: Callable[[str], Batch], class_names: list[str]
) -> ImageData:
    """Assemble a data set from its batches; some of several training batches may be missing."""
    present = [batch + suffix for batch in cifar.train if batch + suffix in archive.names]
    train_x, train_y = _split(archive, cifar, present or [cifar.train[0] + suffix], read_batch)
    test_x, test_y = _split(archive, cifar, [cifar.test + suffix], read_batch)
    names = class_names or [str(label) for label in range(cifar.classes)]
    if len(names) != cifar.classes:
        raise DataError(f"{archive.path}: expected {cifar.classes} class names, found {len(names)}")
    return ImageData(name, train_x, train_y, test_x, test_y, tuple(names))


def _split(
    archive: Archive, cifar: Cifar, files: list[str], read_batch: Callable[[str], Batch]
) -> tuple[Tensor, Tensor]:
    batches = [read_batch(file) for file in files]
    for file, (pixels, labels) in zip(files, batches, strict=True):
        _check_batch(f"{archive.path}, {file}", pixels, labels, cifar.classes)
    pixels = np.concatenate([pixels for pixels, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.astype(np.int64))


def _check_batch(where: str, pixels: np.ndarray, labels: np.ndarray, classes: int) -> None:
    if len(pixels) != len(labels):
        raise DataError(f"{where}: {len(pixels)} images but {len(labels)} labels")
    if len(labels) == 0:
        raise DataError(f"{where}: expected at least one image, found none")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise DataError(f"{where}: expected labels 0..{classes - 1}, found {wrong[0]}")
