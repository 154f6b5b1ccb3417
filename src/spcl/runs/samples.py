"""Samples to predict, from picture files, folders of pictures and NumPy files, in the form the model was trained on."""

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spcl.batches import Inputs as Samples
from spcl.batches import as_tensor
from spcl.data.pictures import Mode, decode_picture
from spcl.errors import DataError
from spcl.models import InputSpec

__all__ = ["SampleFile", "Samples", "assemble", "find_files", "open_file"]

MODES: dict[int, Mode] = {1: "L", 3: "RGB"}
ARRAYS = (".npy", ".npz")

T = TypeVar("T")


@dataclass(frozen=True)
class SampleFile:
    """A file of samples.

    Attributes:
        path: the file.
        count: the number of its samples, 1 for a picture.
        is_picture: whether it is a picture, whose sample has no index.
        read: returns the samples from one index to another.
    """

    path: Path
    count: int
    is_picture: bool
    read: Callable[[int, int], Samples]


def assemble(inputs: InputSpec, parts: Mapping[str, T]) -> T | dict[str, T] | tuple[T, ...]:
    """Return the parts of samples by name in the structure of the inputs: one alone, a dict, or a tuple.

    >>> pair = InputSpec.of((torch.zeros(1, 2), torch.zeros(1)))
    >>> assemble(pair, {"0": "first", "1": "second"})
    ('first', 'second')
    """
    if inputs.parts is None:
        return next(iter(parts.values()))
    return tuple(parts.values()) if all(name.isdigit() for name in parts) else dict(parts)


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files, and the visible pictures in folders; a folder without pictures is yielded as it is."""
    readable = Image.registered_extensions()
    for path in paths:
        files = sorted(path.rglob("[!.]*")) if path.is_dir() else []
        yield from [file for file in files if file.suffix.lower() in readable and file.is_file()] or [path]


def open_file(path: Path, inputs: InputSpec) -> SampleFile:
    """Open a picture, or an .npy or .npz file, whose samples are to fit these inputs."""
    if path.is_dir():
        raise DataError(f"{path}: expected a folder of pictures, found none in it")
    if path.suffix.lower() not in ARRAYS:
        return SampleFile(path, 1, True, lambda start, stop: _read_picture(path, inputs))
    expected = {"x": inputs} if inputs.parts is None else dict(inputs.parts)
    arrays = _read_arrays(path, expected)
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{path}: its arrays have different numbers of samples, {counts}; give one row per sample")

    def read(start: int, stop: int) -> Samples:
        parts = {name: _samples(path, array[start:stop], expected[name]) for name, array in arrays.items()}
        return assemble(inputs, parts)

    return SampleFile(path, next(iter(counts.values())), False, read)


def _read_picture(path: Path, inputs: InputSpec) -> Tensor:
    """Read a picture as a batch of one, in the mode and size of the training data."""
    is_image = inputs.parts is None and inputs.dtype == torch.uint8 and len(inputs.shape) == 3
    if not is_image or inputs.shape[0] not in MODES:
        raise DataError(
            f"{path}: the model was trained on samples of {inputs}, not on pictures; give an .npy or .npz file"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    channels, height, width = inputs.shape
    return torch.from_numpy(decode_picture(content, str(path), MODES[channels], (width, height)).copy())[None]


def _read_arrays(path: Path, expected: dict[str, InputSpec]) -> dict[str, np.ndarray]:
    found = _load(path, expected)
    if missing := sorted(expected.keys() - found.keys()):
        raise DataError(f"{path} must hold the arrays {', '.join(expected)}, but it has no {', '.join(missing)}")
    return {name: _checked(path, name, found[name], inputs) for name, inputs in expected.items()}


def _load(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    try:
        if path.suffix.lower() == ".npy":
            return {"x": np.load(path, mmap_mode="r")}
        with path.open("rb") as file:
            loaded = np.load(file)
            return {name: loaded[name] for name in names if name in loaded}
    except OSError as error:
        reason = error.strerror or "it is damaged"
    except (ValueError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile):  # numpy's text advises to load pickles
        reason = "it is damaged, or its arrays hold Python objects"
    raise DataError(f"{path} cannot be read: {reason}")


def _checked(path: Path, name: str, array: np.ndarray, inputs: InputSpec) -> np.ndarray:
    if inputs.dtype == torch.uint8 and array.ndim == 3 and inputs.shape[0] == 1:
        array = array[:, None]  # grey pictures N×H×W, as in training data
    if array.ndim == 0 or array.shape[1:] != inputs.shape:
        raise DataError(f"{path}: {name} has the shape {array.shape}, expected (N, {str(inputs.shape)[1:]}")
    if not _fits(array.dtype, inputs.dtype):
        kind = str(inputs.dtype).removeprefix("torch.")
        raise DataError(f"{path}: {name} holds {array.dtype}, expected {kind}; convert it with astype({kind!r})")
    if len(array) == 0:
        raise DataError(f"{path}: {name} holds no samples")
    return array


def _fits(found: np.dtype[Any], expected: torch.dtype) -> bool:
    if expected.is_floating_point:
        return found.kind == "f"
    return found == np.uint8 if expected == torch.uint8 else found.kind in "iu"


def _samples(path: Path, array: np.ndarray, inputs: InputSpec) -> Tensor:
    x = as_tensor(np.ascontiguousarray(array)).to(inputs.dtype)
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise DataError(f"{path}: some values are NaN, infinite or too large for {x.dtype}; replace them")
    return x
