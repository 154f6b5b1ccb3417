"""Access to files by name in a folder, a tar.gz or a zip; archives are read in memory, never extracted."""

import gzip
import stat
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from spcl.errors import DataError

__all__ = ["MAX_BYTES", "Archive", "file_states", "fingerprint", "open_archive"]

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

    Only the files below the folder `top` of an archive are used, and those of a folder that match `pattern`. An archive
    with a member that points outside it, or that is a link or a device, is an error.
    """
    if path.is_dir():
        return _Folder(path, pattern)
    return _Zip(path, top) if path.suffix == ".zip" else _Tar(path, top)


def fingerprint(path: Path, pattern: str = "**/*") -> list[tuple[str, int, int]]:
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
