"""Custom data from an .npz file."""

import zipfile
from pathlib import Path

import numpy as np

from spcl.data.custom import from_arrays
from spcl.data.image_data import ImageData
from spcl.errors import DataError

__all__ = ["from_npz"]

ARRAYS = ("x", "y", "test_x", "test_y")
HOW_TO_WRITE = "write it with np.savez(path, x=…, y=…)"


def from_npz(path: str | Path) -> ImageData:
    """Make a data set of an .npz file with samples ``x`` and labels ``y``, and perhaps ``test_x`` and ``test_y``.

    Other arrays in the file are ignored; samples and labels are those of `from_arrays`.
    """
    file = Path(path).expanduser()
    arrays = _read_arrays(file)
    return from_arrays(arrays["x"], arrays["y"], arrays.get("test_x"), arrays.get("test_y"), name=file.stem)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            loaded = np.load(file)
            names = ["one array without a name"] if isinstance(loaded, np.ndarray) else list(loaded)
            arrays = {name: loaded[name] for name in ARRAYS if name in names}
    except Exception as error:  # numpy's readers raise many kinds on damaged files
        raise DataError(f"cannot read {path}: {_reason(error, path)}; {HOW_TO_WRITE}") from error
    if not {"x", "y"} <= arrays.keys():
        raise DataError(
            f"{path} must hold arrays x and y (and perhaps test_x and test_y), found {', '.join(names) or 'nothing'}; "
            f"{HOW_TO_WRITE}"
        )
    return arrays


def _reason(error: Exception, path: Path) -> str:
    """Return why reading failed, without numpy's advice to load pickles, which can execute code."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "pickle" not in str(error):
        return str(error)
    return "its arrays hold Python objects" if zipfile.is_zipfile(path) else "it is damaged, or not an .npz file"
