"""A hub in a folder: every message is a file that appears at once, in the folder of its task."""

import errno
import os
import re
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from spcl.errors import DataError, TaskError
from spcl.files import atomic_write, write_text
from spcl.sources.base import Data, Entry, ResetError
from spcl.sources.dead_letters import DeadLetters
from spcl.sources.hub import HUBS, first_number
from spcl.sources.wire import too_large

__all__ = ["FolderHub"]

SUFFIX = ".safetensors"
DIGITS = 20
ENDED = ".ended"
LOCK = ".lock"
SHORTEST_PAUSE = 0.002
LONGEST_PAUSE = 0.1
USUAL_BYTES = 2**16  # of a file; more are read by further calls
UNREADABLE = (errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.ESPIPE)  # of a file, for good
RELIST_SECONDS = 0.5  # after which a folder is listed again though it seems unchanged: its time of change has ticks


@dataclass(frozen=True)
class _Listing:
    """The names in a folder after a position, up to the last of them; when, and the folder's time of change before."""

    after: str
    names: list[str]
    changed: int
    made: float

    def reaches(self, position: str) -> bool:
        """Return whether it has names after a position, without a gap."""
        return self.after <= position and bool(self.names) and self.names[-1] > position


@HUBS.register("folder")
class FolderHub:
    """A hub without a broker: ``tasks/<task>/<position>.safetensors``, read in the order of the names.

    Publishers of this class number the files. Files of any other origin must appear at once (written under a name that
    begins with a dot, then renamed) and have names that sort after those that were there before.

    Dead letters are in ``dead-letters/<task>``, each beside a ``.txt`` with the reason; the newest 10,000 are kept.

    Args:
        path: the folder; made if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._tasks = Path(path) / "tasks"
        self._dead_letters = DeadLetters(Path(path) / "dead-letters")
        self._tasks.mkdir(parents=True, exist_ok=True)
        self._listings: dict[str, _Listing] = {}

    def tasks(self) -> list[str]:
        """Return the folders of tasks that have not ended, sorted."""
        with os.scandir(self._tasks) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        return sorted(name for name in names if not (self._tasks / name / ENDED).exists())

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int
    ) -> dict[str, Sequence[Entry]]:
        """Return the content of the next files of every task in the order of their names."""
        deadline, pause, load = time.monotonic() + wait, SHORTEST_PAUSE, _Loader(max_bytes)
        while True:
            found = {task: self._read_now(task, position, count, load) for task, position in after.items()}
            if any(found.values()) or time.monotonic() >= deadline:
                return found
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _read_now(self, task: str, after: str | None, count: int, load: "_Loader") -> Sequence[Entry]:
        found: list[Entry] = []
        folder = f"{self._tasks}/{task}"
        for name in self._names_after(task, after, count):
            try:
                found.append((name, load(f"{folder}/{name}{SUFFIX}")))
            except FileNotFoundError:  # trimmed meanwhile
                self._listings.pop(task, None)
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise
                found.append((name, DataError(f"the file cannot be read: {error.strerror}")))
        return found

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        """Write a file under the next number; of several publishers, every one gets a number of its own."""
        folder = self._tasks / task
        folder.mkdir(exist_ok=True)
        with FileLock(folder / LOCK):
            if (folder / ENDED).exists():
                raise TaskError(f"task {task!r} has ended; publish under another name")
            names = self._names(task)
            name = _successor(names[-1]) if names else f"{first_number():0{DIGITS}}"
            with atomic_write(folder / f"{name}{SUFFIX}") as file:
                file.write(data)
        self._delete(task, names[: max(0, len(names) + 1 - keep)] if keep is not None else [])
        return name

    def backlog(self, task: str, after: str | None) -> int:
        """Return the number of files whose names sort after a position."""
        return sum(after is None or name > after for name in self._names_up_to(task, after))

    def trim(self, task: str, upto: str) -> None:
        """Delete files before a position; its own file stays, from which publishers continue the numbers."""
        self._delete(task, [name for name in self._names_up_to(task, upto) if name < upto])

    def end(self, task: str) -> None:
        """Delete the files of a task and refuse others."""
        folder = self._tasks / task
        folder.mkdir(exist_ok=True)
        with FileLock(folder / LOCK):
            write_text(folder / ENDED, "")
        self._delete(task, self._names(task))

    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        """Keep the message under its name, and the reason beside it."""
        self._dead_letters.add(task, self._tasks / task / f"{position}{SUFFIX}", data, reason)

    def close(self) -> None:
        """Do nothing: files are open only while they are read or written."""

    def _names_after(self, task: str, after: str | None, count: int) -> list[str]:
        """Return up to ``count`` names after a position, without a gap.

        A listing may miss a file that appears while it is made, and have one that appeared later. The second listing
        has all that appeared before the last of the first.
        """
        start, listing = after or "", self._listings.get(task)
        if listing is None or not listing.reaches(start):
            listing = self._listings[task] = self._new_listing(task, start, listing)
        index = bisect_right(listing.names, start)
        return listing.names[index : index + count]

    def _new_listing(self, task: str, start: str, old: _Listing | None) -> _Listing:
        changed, now = _time_of_change(self._tasks / task), time.monotonic()
        if old is not None and old.after <= start and old.changed == changed and now < old.made + RELIST_SECONDS:
            return old
        first = self._names(task)
        names = [name for name in self._names(task) if start < name <= first[-1]] if first else []
        return _Listing(start, names, changed, now)

    def _names_up_to(self, task: str, position: str | None) -> list[str]:
        """Return all names, which are not all before a position."""
        for _ in range(2):  # a listing may miss a file that appears while it is made
            names = self._names(task)
            if position is None or not names or position <= names[-1]:
                return names
        raise ResetError(task, names[-1], position or "")

    def _names(self, task: str) -> list[str]:
        try:
            with os.scandir(self._tasks / task) as entries:
                names = [entry.name for entry in entries]
        except FileNotFoundError:
            return []
        return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX) and name[0] != ".")

    def _delete(self, task: str, names: list[str]) -> None:
        for name in names:
            with suppress(IsADirectoryError):  # is none of ours
                (self._tasks / task / f"{name}{SUFFIX}").unlink(missing_ok=True)


def _time_of_change(folder: Path) -> int:
    """Return when a file appeared in a folder or left it, in nanoseconds; 0 while there is none."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class _Loader:
    """Reads files, into memory that tensors may share.

    Every call of the system gives Python's lock away, to a thread that trains: of small files, these are the fewest.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._space = bytearray(USUAL_BYTES)

    def __call__(self, path: str) -> Data | DataError:
        """Return the content of a file, or the error that it is too large."""
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
        try:
            if (size := os.preadv(file, [self._space], 0)) < len(self._space):
                return self._space[:size]
            if (size := os.fstat(file).st_size) > self._max_bytes:
                return too_large(size, self._max_bytes)
            content = bytearray(size)
            with open(file, "rb", closefd=False) as whole:
                del content[whole.readinto(content) :]
            return content
        finally:
            os.close(file)


def _successor(last: str) -> str:
    """Return a name that sorts after the last: the next number, if need be after a foreign name.

    >>> _successor("00000000000000000007"), _successor("photo")
    ('00000000000000000008', 'photo-00000000000000000001')
    """
    numbered = re.fullmatch(r"(.*?)(\d{20})", last)
    stem, number = numbered.groups() if numbered else (f"{last}-", "0")
    return f"{stem}{int(number) + 1:0{DIGITS}}"
