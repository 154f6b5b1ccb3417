"""Dead letters in a folder: files that cannot be learned, each beside a text with the reason."""

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from spcl.files import atomic_write, write_text

__all__ = ["DeadLetters"]

MOST = 10_000  # of a task
COUNTED_EVERY = MOST // 100  # letters
LONGEST_NAME = 200  # bytes, of the 255 of a file's name
REASON = ".txt"


class DeadLetters:
    """The newest dead letters of every task.

    Args:
        path: the folder; tasks have folders in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._uncounted: dict[str, int] = {}

    def add(self, task: str, file: Path, data: bytes, reason: str) -> None:
        """Keep a file by a link, since it may be too large to be read; where that is impossible, its content."""
        folder = self._path / task
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"{_short(file.stem)}{file.suffix}"
        with suppress(OSError):
            os.link(file, kept, follow_symlinks=False)
        if not kept.exists():
            with atomic_write(kept) as copy:
                copy.write(data)
        write_text(kept.with_suffix(REASON), f"{reason}\n")
        self._uncounted[task] = self._uncounted.get(task, COUNTED_EVERY) + 1
        if self._uncounted[task] > COUNTED_EVERY:
            self._uncounted[task] = 0
            _discard_old(folder, file.suffix)


def _discard_old(folder: Path, suffix: str) -> None:
    reasons = sorted(folder.glob(f"*{REASON}"), key=lambda path: (path.stat().st_mtime, path.name))
    for path in reasons[:-MOST]:
        path.with_suffix(suffix).unlink(missing_ok=True)
        path.unlink()


def _short(name: str) -> str:
    """Return a name as it is, or its beginning and hash where the name of a temporary file would become too long.

    >>> _short("photo"), len(_short("x" * 240))
    ('photo', 105)
    """
    if len(os.fsencode(name)) <= LONGEST_NAME:
        return name
    return f"{name[:40]}-{sha256(os.fsencode(name)).hexdigest()}"
