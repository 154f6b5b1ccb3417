"""Custom data from an .npz file."""

import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import numpy as np

from spcl.data.custom import from_arrays
from spcl.data.custom_sources import from_sources
from spcl.data.image_data import ImageData
from spcl.data.source_data import Kind, SourceData
from spcl.errors import DataError

__all__ = ["from_npz"]

PARTS = ("x", "y", "test_x", "test_y")
HOW_TO_WRITE = "write it with np.savez(path, x=…, y=…)"


def from_npz(path: str | Path) -> ImageData | SourceData:
    """Make a data set of an .npz file with samples ``x`` and targets ``y``, and perhaps ``test_x`` and ``test_y``.

    A vector of integers or text holds labels, whose classes are split into tasks, as `from_arrays` says. Other targets
    are those of a regression or multi-label, one source with the name of the file. A file without ``x`` may hold
    several sources, each a task: ``NAME_x`` and ``NAME_y``, and perhaps ``NAME_test_x`` and ``NAME_test_y``.

    Samples, targets and kinds are those of `from_sources`; a kind that the targets do not show is given as text,
    ``kind`` or ``NAME_kind``. Other arrays in the file are ignored.
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
    """Read the arrays whose names may be those of samples, targets or kinds."""
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
    """Return the names of which there are samples and targets."""
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
