"""Cache of decoded data sets on disk, opened as memory maps."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from spcl.data.image_data import ImageData
from spcl.data.paths import cache_dir
from spcl.files import atomic_write, read_json, write_text

__all__ = ["cached"]

FORMAT = 1
ARRAYS = ("train_x", "train_y", "test_x", "test_y")


def cached(name: str, identity: object, make: Callable[[], ImageData], *, renew: bool = False) -> ImageData:
    """Return the data set cached for this `identity` (any JSON value), or cache and return the one from `make`.

    A cache that is missing or damaged is written again, as with `renew`. Several processes may do so concurrently:
    they write the same bytes, and every file is replaced atomically. Where the cache cannot be written, a
    :class:`RuntimeWarning` is given and the data set returned uncached.
    """
    safe_name = re.sub(r"[^\w.-]", "_", name)
    folder = cache_dir() / "decoded" / f"{safe_name}-{_digest(identity)}"
    if not renew and (data := _open(folder, name)) is not None:
        return data
    made = make()
    try:
        _write(folder, made)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        warnings.warn(
            f"cannot write the cache {folder} ({error.strerror or error}), so {name} will be decoded again next time; "
            "set SPCL_CACHE to a writable folder with enough space",
            RuntimeWarning,
            stacklevel=2,
        )
        return made
    opened = _open(folder, name)
    return made if opened is None else opened


def _digest(identity: object) -> str:
    return sha256(json.dumps([FORMAT, identity]).encode()).hexdigest()[:16]


def _open(folder: Path, name: str) -> ImageData | None:
    try:
        class_names = read_json(folder / "class_names.json")
        # Copy-on-write maps: pages are read when used, and writing to a tensor neither changes the file nor crashes.
        arrays = {array: np.load(folder / f"{array}.npy", mmap_mode="c") for array in ARRAYS}
        tensors = {array: torch.from_numpy(values) for array, values in arrays.items()}
        return ImageData(name, **tensors, class_names=tuple(class_names))
    except (OSError, EOFError, ValueError, TypeError):  # missing, truncated or altered; DataError is a ValueError
        return None


def _write(folder: Path, data: ImageData) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for array in ARRAYS:
        with atomic_write(folder / f"{array}.npy") as file:
            np.save(file, getattr(data, array).numpy())
    write_text(folder / "class_names.json", json.dumps(data.class_names))
