"""A hub in a folder: every message is a file that appears at once, in the folder of its task."""

import os
import re
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from spcl.errors import TaskError
from spcl.files import atomic_write, write_text
from spcl.sources.base import Data, ResetError
from spcl.sources.hub import HUBS, first_number

__all__ = ["FolderHub"]

SUFFIX = ".safetensors"
DIGITS = 20
ENDED = ".ended"
LOCK = ".lock"
SHORTEST_PAUSE = 0.002
LONGEST_PAUSE = 0.1
USUAL_BYTES = 2**16  # of a file; more are read by one more call
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

    Dead letters are in ``dead-letters/<task>``, each beside a ``.txt`` with the reason.

    Args:
        path: the folder; made if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._tasks = Path(path) / "tasks"
        self._dead = Path(path) / "dead-letters"
        self._tasks.mkdir(parents=True, exist_ok=True)
        self._listings: dict[str, _Listing] = {}

    def tasks(self) -> list[str]:
        """Return the folders of tasks that have not ended, sorted."""
        with os.scandir(self._tasks) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        return sorted(name for name in names if not (self._tasks / name / ENDED).exists())

    def read(self, after: Mapping[str, str | None], count: int, wait: float) -> dict[str, list[tuple[str, Data]]]:
        """Return the content of the next files of every task in the order of their names."""
        deadline, pause, space = time.monotonic() + wait, SHORTEST_PAUSE, bytearray(USUAL_BYTES)
        while True:
            found = {task: self._read_now(task, position, count, space) for task, position in after.items()}
            if any(found.values()) or time.monotonic() >= deadline:
                return found
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _read_now(self, task: str, after: str | None, count: int, space: bytearray) -> list[tuple[str, Data]]:
        found: list[tuple[str, Data]] = []
        folder = f"{self._tasks}/{task}"
        for name in self._names_after(task, after, count):
            try:
                found.append((name, _content(f"{folder}/{name}{SUFFIX}", space)))
            except FileNotFoundError:  # trimmed meanwhile
                self._listings.pop(task, None)
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
        """Write the message under its name, and the reason beside it."""
        folder = self._dead / task
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f"{position}{SUFFIX}") as file:
            file.write(data)
        write_text(folder / f"{position}.txt", f"{reason}\n")

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
            (self._tasks / task / f"{name}{SUFFIX}").unlink(missing_ok=True)


def _time_of_change(folder: Path) -> int:
    """Return when a file appeared in a folder or left it, in nanoseconds; 0 while there is none."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _content(path: str, space: bytearray) -> bytearray:
    """Return the content of a file, in memory that tensors may share; ``space`` grows until the file fits.

    Every call of the system gives Python's lock away, to a thread that trains: these are the fewest.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        while (size := os.preadv(file, [space], 0)) == len(space):
            space.extend(bytes(size))
        return space[:size]
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
