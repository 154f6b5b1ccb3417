"""Restricted unpickling of plain data: dictionaries, lists, text, numbers and byte arrays.

A pickle may call only the stand-ins defined here, so it can create nothing but the objects of this file.
"""

import io
import pickle
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from spcl.errors import DataError

__all__ = ["load_plain_pickle"]


def load_plain_pickle(content: bytes, origin: str) -> Any:
    """Read a pickle of plain data and uint8 numpy arrays, written by Python 2 or 3; text of Python 2 becomes bytes.

    >>> load_plain_pickle(pickle.dumps({"labels": [1, 2]}), "batch")
    {'labels': [1, 2]}
    >>> load_plain_pickle(pickle.dumps(len), "batch")
    Traceback (most recent call last):
    spcl.errors.DataError: batch: refused, because the pickle asks for builtins.len, and only plain data is read
    """
    try:
        return _arrays(_PlainUnpickler(io.BytesIO(content), encoding="bytes").load())
    except _RefusedGlobalError as refused:
        message = f"{origin}: refused, because the pickle asks for {refused}, and only plain data is read"
        raise DataError(message) from None
    except Exception as error:  # a damaged pickle can make the unpickler raise almost anything
        raise DataError(
            f"{origin}: expected a pickle of plain data and byte arrays, could not read it ({error})"
        ) from error


class _RefusedGlobalError(Exception):
    """A pickle that imports something that plain data does not need."""


class _Array:
    """Stand-in for a numpy array while the pickle is read."""

    pixels: np.ndarray

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[int, tuple[int, ...], object, bool, bytes]) -> None:
        _, shape, dtype, fortran_order, raw = state
        if not isinstance(dtype, _ByteType) or fortran_order or prod(shape) != len(raw):
            raise ValueError(f"an array of {shape} with {len(raw)} bytes")
        self.pixels = np.frombuffer(raw, np.uint8).reshape(shape)


class _ByteType:
    """Stand-in for ``numpy.dtype("u1")``, the only dtype allowed."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise ValueError(f"an array of type {code!r} instead of bytes")

    def __setstate__(self, state: object) -> None: ...


def _latin1(text: str, encoding: str | bytes) -> bytes:
    """Stand-in for ``_codecs.encode``, which Python 3 uses to write bytes for Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[str, Callable[..., object]] = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Array,
    "numpy.dtype": _ByteType,
    "_codecs.encode": _latin1,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (full_name := f"{module}.{name}") in _ALLOWED:
            return _ALLOWED[full_name]
        raise _RefusedGlobalError(full_name)


def _arrays(content: Any) -> Any:
    """Replace the stand-ins in a dictionary by their arrays."""
    if not isinstance(content, dict):
        return content
    return {key: entry.pixels if isinstance(entry, _Array) else entry for key, entry in content.items()}
