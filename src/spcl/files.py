"""Atomic writes, and JSON files that may be missing or damaged."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from spcl.errors import SpclError

__all__ = ["PARTIAL", "atomic_write", "read_json", "scratch_path", "user_errors", "write_json", "write_text"]

PARTIAL = ".partial"
"""The suffix of files that are still being written."""


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the block ends, and is removed when it raises.

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


@contextmanager
def scratch_path(path: Path) -> Iterator[Path]:
    """Yield an unused hidden path beside ``path``, and remove the file that is there when the block ends."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


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


@contextmanager
def user_errors(path: Path) -> Iterator[None]:
    """Raise errors of writing to ``path``, such as a full disk or a read-only folder, as one-line user errors."""
    try:
        yield
    except OSError as error:
        raise SpclError(f"cannot write to {error.filename or path}: {error.strerror or error}") from error
