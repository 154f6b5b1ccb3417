"""Custom data from a folder of pictures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
from PIL import Image

from spcl.data.archives import file_states
from spcl.data.cache import cached
from spcl.data.custom import from_arrays
from spcl.data.image_data import ImageData
from spcl.data.pictures import Mode, decode_picture
from spcl.data.progress import track
from spcl.errors import DataError

__all__ = ["from_folder"]


def from_folder(
    path: str | Path,
    *,
    size: int | Sequence[int] = 32,
    mode: Mode = "RGB",
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
) -> ImageData:
    """Make a data set of a folder with one sub-folder of pictures per class.

    A folder with ``train`` and ``test`` (or ``val``, where there is no ``test``) is split as these folders say; of any
    other, `test_fraction` of every class is held out.

    Pictures are converted to colour (or grey, mode ``"L"``), resized to the width and height `size` (one number for
    both), and cached. Of 16-bit pictures the upper 8 bits are kept (``value >> 8``); pictures of 32-bit
    integers or floats are an error.
    """
    root = Path(path).expanduser()
    name = name or root.name
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give a folder with one sub-folder of pictures per class")
    sides = _width_and_height(size, name)
    if mode not in get_args(Mode):
        raise DataError(f"{name}: mode is {mode!r}; choose one of {', '.join(get_args(Mode))}")
    folders = _split_folders(root) or [root]
    with _unreadable_files_reported(root):
        splits = {folder: _picture_files(folder) for folder in folders}
        states = [file_states(root, files) for files in splits.values()]

    def make() -> ImageData:
        with _unreadable_files_reported(root):
            arrays = [part for folder, files in splits.items() for part in _pictures(folder, files, sides, mode)]
        return from_arrays(*arrays, test_fraction=test_fraction, seed=seed, name=name)

    return cached(
        name,
        [str(root.resolve()), size, mode, test_fraction, seed, states],
        make,
    )


def _width_and_height(size: int | Sequence[int], name: str) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    match sides:
        case [int(width), int(height)] if width >= 1 and height >= 1:
            return width, height
    raise DataError(
        f"{name}: size is {size!r}; give one number for width and height, such as 32, or both, such as [32, 24], each "
        "at least 1"
    )


def _split_folders(root: Path) -> list[Path]:
    """Return the folders of training and test pictures, if there are two."""
    tests = [root / name for name in ("test", "val") if (root / name).is_dir()]
    return [root / "train", tests[0]] if tests and (root / "train").is_dir() else []


def _pictures(folder: Path, files: list[Path], size: tuple[int, int], mode: Mode) -> tuple[np.ndarray, list[str]]:
    """Return the pictures, and the names of their class folders as labels."""
    progress = track(files, f"decoding {folder}", len(files))
    pixels = [decode_picture(file.read_bytes(), str(file), mode, size) for file in progress]
    return np.stack(pixels), [file.parent.name for file in files]


@contextmanager
def _unreadable_files_reported(root: Path) -> Iterator[None]:
    """Turn an OSError into a DataError that names the file, or the folder where the file is unknown."""
    try:
        yield
    except OSError as error:
        unreadable = error.filename or root
        raise DataError(f"{unreadable} cannot be read: {error.strerror}; make it readable or remove it") from error


def _picture_files(folder: Path) -> list[Path]:
    return [file for kind in _class_folders(folder) for file in _pictures_of_class(kind)]


def _class_folders(folder: Path) -> list[Path]:
    folders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise DataError(f"{folder}: expected one sub-folder of pictures per class, found none")
    return folders


def _pictures_of_class(folder: Path) -> list[Path]:
    readable = Image.registered_extensions()
    visible = (entry for entry in folder.iterdir() if not entry.name.startswith("."))  # macOS adds ._NAME.jpg to copies
    named = sorted(entry for entry in visible if entry.suffix.lower() in readable)
    for entry in named:
        if entry.is_symlink() and not entry.exists():
            raise DataError(
                f"{entry} is a link to {entry.readlink()}, which does not exist; restore it or remove the link"
            )
    files = [entry for entry in named if entry.is_file()]
    if not files:
        raise DataError(f"{folder}: expected pictures of this class, found none")
    return files
