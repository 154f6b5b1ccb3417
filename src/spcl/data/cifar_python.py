"""Reader of the Python version of CIFAR: pickled dictionaries, read by a restricted unpickler."""

from functools import partial
from typing import Any

import numpy as np

from spcl.data.archives import Archive
from spcl.data.cifar import CIFAR10, CIFAR100, PIXELS, Batch, Cifar, assemble
from spcl.data.image_data import ImageData
from spcl.data.plain_pickle import load_plain_pickle
from spcl.errors import DataError

__all__ = ["read_cifar10_python", "read_cifar100_python"]


def read_cifar10_python(archive: Archive, name: str) -> ImageData:
    """Read ``data_batch_1`` … ``data_batch_5`` (those present) and ``test_batch``."""
    return _read(archive, name, CIFAR10, "labels", "batches.meta", "label_names")


def read_cifar100_python(archive: Archive, name: str) -> ImageData:
    """Read ``train`` and ``test`` with their fine labels."""
    return _read(archive, name, CIFAR100, "fine_labels", "meta", "fine_label_names")


def _read(archive: Archive, name: str, cifar: Cifar, labels_key: str, meta_file: str, names_key: str) -> ImageData:
    names = _entries(archive, meta_file, names_key)[0] if meta_file in archive.names else []
    class_names = [entry.decode() if isinstance(entry, bytes) else str(entry) for entry in names]
    return assemble(archive, name, cifar, "", partial(_batch, archive, labels_key), class_names)


def _batch(archive: Archive, labels_key: str, file: str) -> Batch:
    pixels, labels = _entries(archive, file, "data", labels_key)
    where = f"{archive.path}, {file}"
    if not (isinstance(pixels, np.ndarray) and pixels.ndim == 2 and pixels.shape[1] == PIXELS):
        found = getattr(pixels, "shape", type(pixels).__name__)
        raise DataError(f"{where}: expected data to be bytes of N×{PIXELS}, found {found}")
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
