"""Readers of the published data sets: EMNIST, CIFAR and Tiny-ImageNet."""

import gzip
import io
import string
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spcl.data.cache import track
from spcl.data.reading import MAX_BYTES, Archive, decode_picture, load_plain_pickle
from spcl.data.samples import ImageData
from spcl.errors import DataError

# -- EMNIST ByClass as published by NIST: four gzipped idx files with transposed images

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
EMNIST_SIDE = 28


def read_emnist(archive: Archive, name: str) -> ImageData:
    """Read the ByClass split: 62 classes 0-9A-Za-z, 28×28 grey, transposed to be upright."""
    train_x, train_y = _emnist_split(archive, "train")
    test_x, test_y = _emnist_split(archive, "test")
    return ImageData(name, train_x, train_y, test_x, test_y, tuple(CHARACTERS))


def _emnist_split(archive: Archive, split: str) -> tuple[Tensor, Tensor]:
    images_name = f"emnist-byclass-{split}-images-idx3-ubyte.gz"
    labels_name = f"emnist-byclass-{split}-labels-idx1-ubyte.gz"
    images, labels = _idx(archive, images_name, 3), _idx(archive, labels_name, 1)
    if images.shape[1:] != (EMNIST_SIDE, EMNIST_SIDE):
        raise DataError(f"{archive.path}, {images_name}: expected images of 28×28, found {images.shape[1:]}")
    if len(images) != len(labels):
        raise DataError(f"{archive.path}: {len(images)} images in {images_name} but {len(labels)} in {labels_name}")
    if len(labels) == 0:
        raise DataError(f"{archive.path}, {images_name}: expected at least one image, found none")
    if labels.max() >= len(CHARACTERS):
        raise DataError(f"{archive.path}, {labels_name}: expected labels 0..61, found {labels.max()}")
    upright = np.ascontiguousarray(images.transpose(0, 2, 1))[:, None]
    return torch.from_numpy(upright), torch.from_numpy(labels.astype(np.int64))


def _idx(archive: Archive, name: str, dimensions: int) -> np.ndarray:
    """Read an idx file: two zero bytes, type 8 (unsigned byte), the number of dimensions, the extents, the data."""
    raw = _gunzip(archive, name)
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic or len(raw) < header:
        raise DataError(f"{archive.path}, {name}: expected an idx file starting {magic.hex()}, found {raw[:4].hex()}")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if len(raw) - header != prod(shape):
        raise DataError(f"{archive.path}, {name}: expected {prod(shape)} bytes of data, found {len(raw) - header}")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _gunzip(archive: Archive, name: str) -> bytes:
    try:
        raw = gzip.GzipFile(fileobj=io.BytesIO(archive.require(name))).read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{archive.path}, {name}: expected a complete gzip file, found a damaged one ({error})"
        ) from error
    if len(raw) > MAX_BYTES:
        raise DataError(f"{archive.path}, {name}: refused, because it would unpack to more than {MAX_BYTES} bytes")
    return raw


# -- CIFAR: batches of images, as binary records or as pickled dictionaries

CIFAR_PIXELS = 3 * 32 * 32
Batch = tuple[np.ndarray, np.ndarray]
"""Pixels, uint8 N×3072 (red, green, blue planes), and N labels."""


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100: its number of classes and the names of its batch files (without ``.bin``)."""

    classes: int
    train: tuple[str, ...]
    test: str


CIFAR10_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
CIFAR10 = Cifar(10, CIFAR10_BATCHES, "test_batch")
CIFAR100 = Cifar(100, ("train",), "test")


def read_cifar10_binary(archive: Archive, name: str) -> ImageData:
    """Read ``data_batch_1.bin`` … ``data_batch_5.bin`` (or some of them) and ``test_batch.bin``."""
    return _read_binary(archive, name, CIFAR10, label_bytes=1, names_file="batches.meta.txt")


def read_cifar100_binary(archive: Archive, name: str) -> ImageData:
    """Read ``train.bin`` and ``test.bin`` with the second of the two label bytes, the fine label."""
    return _read_binary(archive, name, CIFAR100, label_bytes=2, names_file="fine_label_names.txt")


def read_cifar10_python(archive: Archive, name: str) -> ImageData:
    """Read ``data_batch_1`` … ``data_batch_5`` (or some of them) and ``test_batch``."""
    return _read_python(archive, name, CIFAR10, "labels", "batches.meta", "label_names")


def read_cifar100_python(archive: Archive, name: str) -> ImageData:
    """Read ``train`` and ``test`` with their fine labels."""
    return _read_python(archive, name, CIFAR100, "fine_labels", "meta", "fine_label_names")


def _read_binary(archive: Archive, name: str, cifar: Cifar, label_bytes: int, names_file: str) -> ImageData:
    lines = archive.read(names_file).decode(errors="replace").splitlines() if names_file in archive.names else []
    class_names = [line.strip() for line in lines if line.strip()]
    return _assemble(archive, name, cifar, ".bin", partial(_binary_batch, archive, label_bytes), class_names)


def _binary_batch(archive: Archive, label_bytes: int, file: str) -> Batch:
    """Read records of one or two label bytes and 3072 pixel bytes."""
    raw = archive.require(file)
    record = label_bytes + CIFAR_PIXELS
    if len(raw) % record:
        raise DataError(
            f"{archive.path}, {file}: expected records of {record} bytes, found {len(raw)} bytes: "
            f"{len(raw) // record} records and {len(raw) % record} extra bytes"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return records[:, label_bytes:], records[:, label_bytes - 1]


def _read_python(
    archive: Archive, name: str, cifar: Cifar, labels_key: str, meta_file: str, names_key: str
) -> ImageData:
    names = _entries(archive, meta_file, names_key)[0] if meta_file in archive.names else []
    class_names = [entry.decode() if isinstance(entry, bytes) else str(entry) for entry in names]
    return _assemble(archive, name, cifar, "", partial(_python_batch, archive, labels_key), class_names)


def _python_batch(archive: Archive, labels_key: str, file: str) -> Batch:
    pixels, labels = _entries(archive, file, "data", labels_key)
    where = f"{archive.path}, {file}"
    if not (isinstance(pixels, np.ndarray) and pixels.ndim == 2 and pixels.shape[1] == CIFAR_PIXELS):
        found = getattr(pixels, "shape", type(pixels).__name__)
        raise DataError(f"{where}: expected data to be bytes of N×{CIFAR_PIXELS}, found {found}")
    if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise DataError(f"{where}: expected {labels_key} to be a list of integers")
    return pixels, np.asarray(labels, np.int64)


def _entries(archive: Archive, file: str, *keys: str) -> list[Any]:
    where = f"{archive.path}, {file}"
    content = load_plain_pickle(archive.require(file), where)
    if not isinstance(content, dict):
        raise DataError(f"{where}: expected a pickled dictionary, found {type(content).__name__}")
    # Python 2 writes the keys as bytes, Python 3 as text.
    entries = {key.decode(errors="replace") if isinstance(key, bytes) else key: entry for key, entry in content.items()}
    for key in keys:
        if key not in entries:
            raise DataError(f"{where}: expected an entry {key!r}, found {', '.join(map(str, entries)) or 'none'}")
    return [entries[key] for key in keys]


def _assemble(
    archive: Archive, name: str, cifar: Cifar, suffix: str, read_batch: Callable[[str], Batch], class_names: list[str]
) -> ImageData:
    """Assemble a data set from its batches; some of several training batches may be missing."""
    present = [batch + suffix for batch in cifar.train if batch + suffix in archive.names]
    train_x, train_y = _cifar_split(archive, cifar, present or [cifar.train[0] + suffix], read_batch)
    test_x, test_y = _cifar_split(archive, cifar, [cifar.test + suffix], read_batch)
    names = class_names or [str(label) for label in range(cifar.classes)]
    if len(names) != cifar.classes:
        raise DataError(f"{archive.path}: expected {cifar.classes} class names, found {len(names)}")
    return ImageData(name, train_x, train_y, test_x, test_y, tuple(names))


def _cifar_split(
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


# -- Tiny-ImageNet-200 as published: JPEG files of 64×64, some grey, with labels by line of ``wnids.txt``

TINY_SIDE = 64
VALIDATION_LABELS = "val/val_annotations.txt"


def read_tiny_imagenet(archive: Archive, name: str) -> ImageData:
    """Read the training and validation images; the published test images have no labels and are not used."""
    wnids = _lines(archive, "wnids.txt")
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    train_x, train_y = _decode(archive, _train_labels(archive, label_of))
    test_x, test_y = _decode(archive, _validation_labels(archive, label_of))
    return ImageData(name, train_x, train_y, test_x, test_y, _class_names(archive, wnids))


def _train_labels(archive: Archive, label_of: dict[str, int]) -> dict[str, int]:
    """Return the label of every file, from the folder names ``train/<wnid>/images``."""
    files = sorted(file for file in archive.names if file.startswith("train/") and file.endswith(".JPEG"))
    return {file: _label(archive, label_of, file.split("/")[1], file) for file in files}


def _validation_labels(archive: Archive, label_of: dict[str, int]) -> dict[str, int]:
    """Return the label of every file, from the first two columns of the annotations."""
    labels = {}
    for line in _lines(archive, VALIDATION_LABELS):
        file, _, rest = line.partition("\t")
        labels[f"val/images/{file}"] = _label(
            archive, label_of, rest.partition("\t")[0], f"{VALIDATION_LABELS}, {file}"
        )
    present = {file for file in archive.names if file.startswith("val/images/")}
    if unlabelled := present - labels.keys():
        raise DataError(
            f"{archive.path}: {len(unlabelled)} images without a line in {VALIDATION_LABELS}: {min(unlabelled)}"
        )
    return labels


def _label(archive: Archive, label_of: dict[str, int], wnid: str, where: str) -> int:
    if wnid not in label_of:
        raise DataError(f"{archive.path}, {where}: expected a class of wnids.txt, found {wnid!r}")
    return label_of[wnid]


def _decode(archive: Archive, labels: dict[str, int]) -> tuple[Tensor, Tensor]:
    if not labels:
        raise DataError(f"{archive.path}: expected JPEG files in train/<class>/images and val/images, found none")
    images = np.empty((len(labels), 3, TINY_SIDE, TINY_SIDE), np.uint8)
    for i, file in enumerate(track(labels, f"decoding {archive.path.name}", len(labels))):
        where = f"{archive.path}, {file}"
        image = decode_picture(archive.require(file), where, "RGB")
        if image.shape[1:] != (TINY_SIDE, TINY_SIDE):
            raise DataError(f"{where}: expected an image of 64×64, found {image.shape[2]}×{image.shape[1]}")
        images[i] = image
    return torch.from_numpy(images), torch.tensor(list(labels.values()))


def _class_names(archive: Archive, wnids: list[str]) -> tuple[str, ...]:
    """Return the first synonym in ``words.txt`` for each class, or its id where there is none."""
    lines = _lines(archive, "words.txt") if "words.txt" in archive.names else []
    words = {wnid: synonyms.split(",")[0] for wnid, _, synonyms in (line.partition("\t") for line in lines)}
    return tuple(words.get(wnid, wnid) for wnid in wnids)


def _lines(archive: Archive, name: str) -> list[str]:
    text = archive.require(name).decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]
