"""Reader of the binary version of CIFAR: records of one or two label bytes and 3072 pixel bytes."""

from functools import partial

import numpy as np

from spcl.data.archives import Archive
from spcl.data.cifar import CIFAR10, CIFAR100, PIXELS, Batch, Cifar, assemble
from spcl.data.image_data import ImageData
from spcl.errors import DataError

__all__ = ["read_cifar10_binary", "read_cifar100_binary"]


def read_cifar10_binary(archive: Archive, name: str) -> ImageData:
    """Read ``data_batch_1.bin`` … ``data_batch_5.bin`` (those present) and ``test_batch.bin``."""
    return _read(archive, name, CIFAR10, label_bytes=1, names_file="batches.meta.txt")


def read_cifar100_binary(archive: Archive, name: str) -> ImageData:
    """Read ``train.bin`` and ``test.bin`` with the second of the two label bytes, the fine label."""
    return _read(archive, name, CIFAR100, label_bytes=2, names_file="fine_label_names.txt")


def _read(archive: Archive, name: str, cifar: Cifar, label_bytes: int, names_file: str) -> ImageData:
    lines = archive.read(names_file).decode(errors="replace").splitlines() if names_file in archive.names else []
    class_names = [line.strip() for line in lines if line.strip()]
    return assemble(archive, name, cifar, ".bin", partial(_batch, archive, label_bytes), class_names)


def _batch(archive: Archive, label_bytes: int, file: str) -> Batch:
    raw = archive.require(file)
    record = label_bytes + PIXELS
    if len(raw) % record:
        raise DataError(
            f"{archive.path}, {file}: expected records of {record} bytes, found {len(raw)} bytes: "
            f"{len(raw) // record} records and {len(raw) % record} extra bytes"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return records[:, label_bytes:], records[:, label_bytes - 1]
