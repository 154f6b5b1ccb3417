"""Atomic writes, JSON files that may be missing or damaged, and locks between processes."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from spcl.errors import SpclError

PARTIAL = ".partial"
"""The suffix of files that are still being written."""


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the block ends, and is removed when it raises.

    File and folder are synchronised, so that the new file survives a power cut.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "numbers.txt"
    >>> with atomic_write(path) as file:
    ...     _ = file.write(b"1 2 3")
    >>> path.read_text()
    '1 2 3'
    """
    with scratch_path(path) as scratch:
        with scratch.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk: without it, a file that was renamed may have its old name after a crash."""
    if os.name != "posix":  # other systems cannot open a folder
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def scratch_path(path: Path) -> Iterator[Path]:
    """Yield an unused hidden path beside ``path``, and remove the file that is there when the block ends."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def remove_partial_files(folder: Path, name: str = "*") -> None:
    """Remove what killed writers left of the files that match ``name`` in a folder that nobody else writes to.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in (".a.json.0123abcd.partial", "mine.partial"):
    ...     (folder / name).touch()
    >>> remove_partial_files(folder)
    >>> [path.name for path in folder.iterdir()]
    ['mine.partial']
    """
    for partial in folder.glob(f".{name}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Any) -> None:
    """Write an indented JSON file atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None where it is missing, unreadable or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_secret(what: str, variable: str | None, file: str | os.PathLike[str] | None) -> str | None:
    """Return the secret in an environment variable or a file; None where neither is named.

    Args:
        what: the name of the secret in errors, such as ``token``.
        variable: the name of the variable, which precedes the file.
        file: the file.
    """
    if variable is not None:
        found, where = os.environ.get(variable, ""), f"the environment variable {variable}"
    elif file is not None:
        try:
            found, where = Path(file).read_text(encoding="utf-8").strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise SpclError(f"the {what} cannot be read from {file}: {error}") from None
    else:
        return None
    if not found:
        raise SpclError(f"{where} holds no {what}; put one there, or name neither a variable nor a file")
    return found


@contextmanager
def user_errors(path: Path) -> Iterator[None]:
    """Raise errors of writing to ``path``, such as a full disk or a read-only folder, as one-line user errors."""
    try:
        yield
    except OSError as error:
        raise SpclError(f"cannot write to {error.filename or path}: {error.strerror or error}") from error


# -- locks

RETRY_SECONDS = 0.2


@contextmanager
def locked(file: Path, wait: Callable[[], bool] | None = None) -> Iterator[bool]:
    """Hold a lock file within the block; yield whether it is held.

    The operating system releases the lock when the process ends, in whatever way.

    Args:
        file: in a folder that exists.
        wait: called again and again while another process holds the lock; returns whether to try once more. By default
            the lock is tried once.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(file, timeout=0, thread_local=False)

    def acquire() -> bool:
        try:
            lock.acquire()
        except Timeout:
            return False
        return True

    held = acquire()
    while not held and wait is not None and wait():
        time.sleep(RETRY_SECONDS)
        held = acquire()
    try:
        yield held
    finally:
        lock.release()
