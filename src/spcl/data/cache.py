"""Decoded data sets on disk, opened as memory maps: decoding happens once."""

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np
import torch

from spcl.data.image_data import ImageData
from spcl.data.paths import cache_dir

__all__ = ["cached"]

FORMAT = 1
ARRAYS = ("train_x", "train_y", "test_x", "test_y")


def cached(name: str, identity: object, make: Callable[[], ImageData], *, renew: bool = False) -> ImageData:
    """The data set made earlier for this `identity` (any JSON value), or a new one from `make`, kept for the next time.

    A cache that is missing or damaged is made again, as it is with `renew`. Any number of processes may do so at
    once: they write the same bytes, and every file appears complete or not at all. Where nothing can be kept, a
    :class:`RuntimeWarning` says so, and the new data set is returned all the same.
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
            f"cannot write the cache {folder} ({error.strerror or error}), so {name} will be made again next time; "
            "set SPCL_CACHE to a folder that can be written and has room",
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
        class_names = json.loads((folder / "class_names.json").read_text())
        # Copy-on-write maps: nothing is read until used, and no write can reach the file or crash the process.
        arrays = {array: np.load(folder / f"{array}.npy", mmap_mode="c") for array in ARRAYS}
        tensors = {array: torch.from_numpy(values) for array, values in arrays.items()}
        return ImageData(name, **tensors, class_names=tuple(class_names))
    except (OSError, EOFError, ValueError, TypeError):  # missing, truncated or altered; DataError is a ValueError
        return None


def _write(folder: Path, data: ImageData) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for array in ARRAYS:
        with _appearing(folder / f"{array}.npy") as file:
            np.save(file, getattr(data, array).numpy())
    with _appearing(folder / "class_names.json") as file:
        file.write(json.dumps(data.class_names).encode())


@contextmanager
def _appearing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its name, in one step, only when it is complete."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise
