"""Safe reading of files from strangers: folders and archives, pickles of plain data, and pictures."""

import gzip
import io
import pickle
import stat
import tarfile
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile

from spcl.errors import DataError

# -- folders and archives, which are read in memory and never extracted

MAX_BYTES = 2**30
"""Largest unpacked size accepted; the published files are smaller, and larger ones may exhaust memory."""


class Archive(ABC):
    """Read-only access to the files of one data set.

    Attributes:
        path: The folder or archive, for messages.
        names: The files, relative to the top folder and with ``/``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: frozenset[str] = frozenset()

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of one file."""

    def require(self, name: str) -> bytes:
        """Return the content of one file; raise a `DataError` if it is missing."""
        if name not in self.names:
            some = ", ".join(sorted(self.names)[:5]) or "nothing"
            raise DataError(f"{self.path}: expected a file {name}, found {some}")
        return self.read(name)


def open_archive(path: Path, top: str, pattern: str = "**/*") -> Archive:
    """Open a folder, a ``.zip`` or a ``.tar.gz``.

    Of an archive only the files below the folder `top` are used, of a folder only the files that match `pattern`. An
    archive is refused if a member points outside it, or is a link or a device.
    """
    if path.is_dir():
        return _Folder(path, pattern)
    return _Zip(path, top) if path.suffix == ".zip" else _Tar(path, top)


def file_stamps(path: Path, pattern: str = "**/*") -> list[tuple[str, int, int]]:
    """Return name, size and modification time of the files that `open_archive` reads, to detect changes."""
    root, files = (path, _files(path, pattern)) if path.is_dir() else (path.parent, [path])
    return file_states(root, files)


def file_states(root: Path, files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the name relative to `root`, size and modification time of every file."""
    states = [(file.relative_to(root).as_posix(), file.stat()) for file in files]
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.glob(pattern) if file.is_file())


class _Folder(Archive):
    def __init__(self, path: Path, pattern: str) -> None:
        super().__init__(path)
        self.names = frozenset(file.relative_to(path).as_posix() for file in _files(path, pattern))

    def read(self, name: str) -> bytes:
        file = self.path / name
        with _damage_reported(file, "readable file"):
            _check_size(file, name, file.stat().st_size)
            return file.read_bytes()


class _Tar(Archive):
    """A gzipped tar archive, read into memory in one pass, as it has no random access."""

    def __init__(self, path: Path, top: str) -> None:
        super().__init__(path)
        self._contents: dict[str, bytes] = {}
        with (
            _damage_reported(path, "complete gzipped tar archive"),
            gzip.open(path) as stream,
            tarfile.open(fileobj=stream, mode="r:") as tar,
        ):
            self._contents = dict(self._members(tar, top))
            while stream.read(1 << 20):  # gzip compares checksums only at its end
                pass
        self.names = frozenset(self._contents)

    def _members(self, tar: tarfile.TarFile, top: str) -> Iterator[tuple[str, bytes]]:
        unpacked = 0
        for member in tar:
            if not (member.isfile() or member.isdir()):
                raise DataError(f"{self.path}: refused, because its member {member.name!r} is a link or a device")
            name = _below(top, _inside(self.path, member.name))
            if name is None or not member.isfile():
                continue
            unpacked += member.size
            _check_size(self.path, member.name, unpacked)
            content = tar.extractfile(member)
            assert content is not None  # extractfile() is None for folders and links only
            yield name, content.read()

    def read(self, name: str) -> bytes:
        return self._contents[name]


class _Zip(Archive):
    def __init__(self, path: Path, top: str) -> None:
        super().__init__(path)
        self._members: dict[str, zipfile.ZipInfo] = {}
        with _damage_reported(path, "complete zip archive"):
            self._zip = zipfile.ZipFile(path)
        for member in self._zip.infolist():
            if stat.S_ISLNK(member.external_attr >> 16):
                raise DataError(f"{path}: refused, because its member {member.filename!r} is a link")
            name = _below(top, _inside(path, member.filename))
            if name is not None and not member.is_dir():
                self._members[name] = member
        self.names = frozenset(self._members)

    def read(self, name: str) -> bytes:
        member = self._members[name]
        _check_size(self.path, member.filename, member.file_size)
        with _damage_reported(self.path, "complete zip archive"):
            return self._zip.read(member)


@contextmanager
def _damage_reported(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the archive modules raise many types on damaged files
        raise DataError(f"{path}: expected a {kind}, could not read it ({error})") from error


def _inside(archive: Path, member: str) -> PurePosixPath:
    """Return the member's path; raise a `DataError` if it points outside the archive."""
    path = PureWindowsPath(member)  # parses both kinds of slash, and drive letters
    if path.anchor or ".." in path.parts:
        raise DataError(f"{archive}: refused, because its member {member!r} points outside the archive")
    return PurePosixPath(path.as_posix())


def _below(top: str, path: PurePosixPath) -> str | None:
    return path.relative_to(top).as_posix() if path.is_relative_to(top) else None


def _check_size(archive: Path, member: str, size: int) -> None:
    if size > MAX_BYTES:
        raise DataError(f"{archive}: refused, because {member} would unpack to {size} bytes (at most {MAX_BYTES})")


# -- pickles of plain data: they may call only the stand-ins defined here, and so create only objects of this file


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


# -- pictures (JPEG, PNG, …), decoded to uint8 arrays

Mode = Literal["L", "RGB"]

SIXTEEN_BIT_IN_32 = ("PNG", "PPM")
"""Formats without 32-bit pictures, whose 16-bit values Pillow opens as 32-bit integers."""


def decode_picture(content: bytes, origin: str, mode: Mode, size: int | tuple[int, int] | None = None) -> np.ndarray:
    """Decode one picture to uint8 C×H×W in grey (``"L"``) or colour (``"RGB"``), resized if `size` is given.

    The size is width and height, or one number for both.
    Of 16-bit pictures the upper 8 bits are kept (``value >> 8``); 32-bit pictures are an error.

    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 2), 7).save(file, "PNG")
    >>> decode_picture(file.getvalue(), "grey.png", "RGB").shape
    (3, 2, 4)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = eight_bit(Image.open(io.BytesIO(content)), origin).convert(mode)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        unknown = isinstance(error, UnidentifiedImageError)  # its message shows a memory address
        reason = "no known format" if unknown else error
        raise DataError(f"{origin}: expected a picture, found something that does not decode ({reason})") from error
    if size is not None:
        width, height = (size, size) if isinstance(size, int) else size
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def eight_bit(picture: Image.Image, origin: str) -> Image.Image:
    """Return the picture with 8 bits per channel.

    Of 16-bit grey the upper 8 bits are kept (``value >> 8``), as Pillow does for 16-bit colour; its conversion of grey
    would clip at 255. Integers and floats of 32 bits are an error, as their range is unknown.

    >>> ramp = np.array([[0, 255, 256, 65535]], np.uint16)
    >>> np.asarray(eight_bit(Image.fromarray(ramp), "ramp.png")).tolist()
    [[0, 0, 1, 255]]
    """
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in SIXTEEN_BIT_IN_32):
        # TIFF has 12-bit grey as well, which Pillow opens as 16-bit without rescaling it.
        bits = picture.tag_v2[BITSPERSAMPLE][0] if isinstance(picture, TiffImageFile) else 16
        return Image.fromarray((np.asarray(picture) >> (bits - 8)).astype(np.uint8))
    if picture.mode in ("I", "F"):
        kind = "32-bit integers" if picture.mode == "I" else "floats"
        raise DataError(
            f"{origin}: its pixels are {kind} of unknown range (mode {picture.mode}); "
            "convert it to 8 or 16 bits, or give the values as floats in an .npz file"
        )
    return picture
