"""Reader of EMNIST ByClass as published by NIST: four gzipped idx files with transposed images."""

import gzip
import io
import string
import struct
import zlib
from math import prod

import numpy as np
import torch
from torch import Tensor

from spcl.data.archives import MAX_BYTES, Archive
from spcl.data.image_data import ImageData
from spcl.errors import DataError

__all__ = ["CHARACTERS", "read_emnist"]

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
SIDE = 28


def read_emnist(archive: Archive, name: str) -> ImageData:
    """Read the ByClass split: 62 classes 0-9A-Za-z, 28×28 grey, transposed to be upright."""
    train_x, train_y = _split(archive, "train")
    test_x, test_y = _split(archive, "test")
    return ImageData(name, train_x, train_y, test_x, test_y, tuple(CHARACTERS))


def _split(archive: Archive, split: str) -> tuple[Tensor, Tensor]:
    images_name = f"emnist-byclass-{split}-images-idx3-ubyte.gz"
    labels_name = f"emnist-byclass-{split}-labels-idx1-ubyte.gz"
    images, labels = _idx(archive, images_name, 3), _idx(archive, labels_name, 1)
    if images.shape[1:] != (SIDE, SIDE):
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
