"""Custom data from files: a folder of pictures, or an .npz file."""

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
from PIL import Image

from spcl.data.cache import cached, track
from spcl.data.custom import from_arrays, from_sources
from spcl.data.reading import Mode, decode_picture, file_states
from spcl.data.samples import ImageData, SourceData
from spcl.errors import DataError
from spcl.tasks import Kind

# -- a folder of pictures


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


# -- an .npz file

PARTS = ("x", "y", "test_x", "test_y")
HOW_TO_WRITE = "write it with np.savez(path, x=…, y=…)"


def from_npz(path: str | Path) -> ImageData | SourceData:
    """Make a data set of an .npz file with samples ``x`` and targets ``y``, and perhaps ``test_x`` and ``test_y``.

    A vector of integers or text holds labels, whose classes are split into tasks (see `from_arrays`). Other targets
    make a regression or multi-label source with the name of the file. A file without ``x`` may hold several sources,
    each a task: ``NAME_x`` and ``NAME_y``, and perhaps ``NAME_test_x`` and ``NAME_test_y``.

    `from_sources` says which samples, targets and kinds there are; a kind that the targets do not show is given as
    text, ``kind`` or ``NAME_kind``. Other arrays in the file are ignored.
    """
    file = Path(path).expanduser()
    arrays = _read_arrays(file)
    if not {"x", "y"} <= arrays.keys():
        prefixes = {name: f"{name}_" for name in _source_names(file, arrays)}
    elif _holds_classes(arrays):
        return from_arrays(arrays["x"], arrays["y"], arrays.get("test_x"), arrays.get("test_y"), name=file.stem)
    else:
        prefixes = {file.stem: ""}
    sources = {name: _parts(file, prefix, arrays) for name, prefix in prefixes.items()}
    named = {name: f"{prefix}kind" for name, prefix in prefixes.items()}
    kinds = {name: _kind(file, kind, arrays[kind]) for name, kind in named.items() if kind in arrays}
    return from_sources(sources, kinds, name=file.stem)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays that may be samples, targets or kinds, by their names."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file)
            names = ["one array without a name"] if isinstance(loaded, np.ndarray) else list(loaded)
            known = PARTS if {"x", "y"} <= set(names) else names
            read = [
                name for name in names if name in (*known, "kind") and name.rpartition("_")[2] in ("x", "y", "kind")
            ]
            arrays = {name: loaded[name] for name in read}
    except Exception as error:  # numpy's readers raise many kinds on damaged files
        raise DataError(f"cannot read {path}: {_reason(error, path)}; {HOW_TO_WRITE}") from error
    if not {"x", "y"} <= arrays.keys() and not _pairs(arrays) - {"test"}:
        raise DataError(
            f"{path} must hold arrays x and y (and perhaps test_x and test_y) or NAME_x and NAME_y of every source, "
            f"found {', '.join(names) or 'nothing'}; {HOW_TO_WRITE}"
        )
    return arrays


def _holds_classes(arrays: dict[str, np.ndarray]) -> bool:
    """Return whether y are labels of classes that are to be split into tasks."""
    y = arrays["y"]
    return "kind" not in arrays and y.dtype.kind != "f" and (y.ndim == 1 or y.dtype.kind not in "biu")


def _pairs(arrays: Iterable[str]) -> set[str]:
    """Return the names that have both samples and targets."""
    ends = {end: {name.removesuffix(end) for name in arrays if name.endswith(end)} for end in ("_x", "_y")}
    return ends["_x"] & ends["_y"]


def _source_names(path: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    pairs = _pairs(arrays)
    for name in arrays:
        stem, _, part = name.rpartition("_")
        if part in ("x", "y") and stem not in pairs:
            missing = name[:-1] + {"x": "y", "y": "x"}[part]
            raise DataError(f"{path} holds {name}, but no {missing}; give samples and targets together")
    first = [name.removesuffix("_x") for name in arrays if name.removesuffix("_x") in pairs]
    return [name for name in first if not (name.endswith("_test") and name.removesuffix("_test") in pairs)]


def _parts(path: Path, prefix: str, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    tests = [f"{prefix}{part}" for part in PARTS[2:]]
    found = [name for name in tests if name in arrays]
    if len(found) == 1:
        raise DataError(f"{path} holds {found[0]}; give {tests[0]} and {tests[1]} together, or neither")
    return tuple(arrays[name] for name in (f"{prefix}x", f"{prefix}y", *found))


def _kind(path: Path, name: str, text: np.ndarray) -> Kind:
    kind = text.item() if text.size == 1 else text.tolist()
    for known in get_args(Kind):
        if kind == known:
            return known  # type: ignore[no-any-return]
    raise DataError(f"{path}: {name} is {kind!r}; choose one of {', '.join(get_args(Kind))}")


def _reason(error: Exception, path: Path) -> str:
    """Return why reading failed, without numpy's advice to load pickles, which can execute code."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "pickle" not in str(error):
        return str(error)
    return "its arrays hold Python objects" if zipfile.is_zipfile(path) else "it is damaged, or not an .npz file"
