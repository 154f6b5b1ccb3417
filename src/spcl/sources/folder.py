"""A hub in a folder: every message is a file that appears at once, in the folder of its task."""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from spcl._util.files import PARTIAL
from spcl.errors import DataError, TaskError
from spcl.sources.base import (
    HUBS,
    Data,
    Entry,
    HubError,
    ResetError,
    check_of,
    checked,
    first_number,
    split_position,
)
from spcl.sources.wire import sequence_of, too_large

SUFFIX = ".safetensors"
DIGITS = 20
ENDED = ".ended"
LOCK = ".lock"
RECORDS = ".publishers"  # a folder of its own, so that writing to it does not change the task's
RECORD = "record.json"
MOST_PUBLISHERS = 1000  # whose last number is remembered
END_SECONDS = 1.0  # for which ending a task waits for its lock: a service tries again
SHORTEST_PAUSE = 0.002
LONGEST_PAUSE = 0.1
USUAL_BYTES = 2**16  # of a file; more are read by further calls
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
UNREADABLE = (errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.ESPIPE)  # of a file, for good
RELIST_SECONDS = 0.5  # after which a folder is listed again though it seems unchanged: its time of change has ticks
RELIST_SECONDS_PER_NAME = 3e-5  # for which a listing is kept though the folder has changed: 20 times as long as it took
MOST_DEAD_LETTERS = 10_000  # of a task
COUNTED_EVERY = MOST_DEAD_LETTERS // 100  # letters
LEFTOVER_SECONDS = 3600.0  # after which a file that is still being written was left by a process that was killed
LONGEST_NAME = 200  # bytes, of the 255 of a file's name
REASON = ".txt"


@dataclass(frozen=True)
class _Listing:
    """The names of the messages in a folder, sorted and without a gap; when, and the folder's time of change before."""

    names: list[str]
    changed: int
    made: float

    def is_good(self, changed: int) -> bool:
        """Return whether the folder need not be listed again yet."""
        kept = len(self.names) * RELIST_SECONDS_PER_NAME
        return 0.0 <= time.time() - self.made < (max(kept, RELIST_SECONDS) if changed == self.changed else kept)


@dataclass
class _Record:
    """What the publishers to a folder tell each other, so that they need not list it for every message.

    Attributes:
        count: how many messages there are.
        last: the name of the newest message; empty before the first.
        changed: the folder's time of change afterwards.
        made: when the folder was listed.
        numbers: the last number of every publisher that numbers its messages, and the position of that message.
    """

    count: int = 0
    last: str = ""
    changed: int = -1
    made: float = 0.0
    numbers: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: int) -> "_Record":
        """Return the record in a folder, or an empty one where it is missing or damaged."""
        try:
            with _opened(RECORDS, folder) as records:
                values = json.loads(_content(RECORD, records))
            record = cls(**values)
            valid = isinstance(record.last, str) and "/" not in record.last and isinstance(record.numbers, dict)
            for value, kind in ((record.count, int), (record.changed, int), (record.made, float)):
                valid = valid and isinstance(value, kind)
            for number, position in record.numbers.values():
                valid = valid and isinstance(number, int) and isinstance(position, str)
        except (OSError, ValueError, TypeError, AttributeError):
            valid = False
        return record if valid else cls()

    def write(self, folder: int) -> None:
        """Keep the record; the folder's time of change does not change."""
        self.changed = _time_of_change(folder)
        self.numbers = dict(list(self.numbers.items())[-MOST_PUBLISHERS:])
        with suppress(FileExistsError):
            os.mkdir(RECORDS, dir_fd=folder)
        with _opened(RECORDS, folder) as records:
            _write(RECORD, json.dumps(asdict(self)).encode(), records, durable=False)

    def is_good(self, changed: int) -> bool:
        """Return whether nobody but publishers of this class has changed the folder."""
        kept = max(self.count * RELIST_SECONDS_PER_NAME, RELIST_SECONDS)
        return changed == self.changed and 0.0 <= time.time() - self.made < kept

    def note(self, data: bytes | bytearray, name: str, position: str) -> None:
        """Note that a message is the newest."""
        self.last = name
        if (sequence := sequence_of(data)) is not None:
            publisher, number = sequence
            self.numbers.pop(publisher, None)  # so that it becomes the last, and the first are forgotten
            self.numbers[publisher] = [number, position]


@HUBS.register("folder")
class FolderHub:
    """A hub without a broker: ``tasks/<task>/<position>.safetensors``, read in the order of the names.

    Publishers of this class number the files. Files of any other origin must appear at once (written under a name that
    begins with a dot, then renamed) and have names that sort after the names that were there before.

    Publishers may belong to other users, so links are never followed: a link in place of a message is refused, and a
    link in place of a folder is an error. Dead letters are in ``dead-letters/<task>``, each beside a ``.txt`` with the
    reason, for this user alone; the newest 10,000 are kept.

    Args:
        path: the folder; made if it does not exist. It may be a link itself.
        patience: seconds for which publishing waits while another publisher holds the lock of a task.
    """

    def __init__(self, path: str | os.PathLike[str], patience: float = 60.0) -> None:
        self._patience = patience
        self._tasks = Path(path) / "tasks"
        self._dead_letters = _DeadLetters(Path(path) / "dead-letters")
        self._tasks.mkdir(parents=True, exist_ok=True)
        self._listings: dict[str, _Listing] = {}

    def tasks(self) -> list[str]:
        """Return the folders of tasks that have not ended, sorted."""
        with _opened(self._tasks) as tasks, os.scandir(tasks) as entries:
            names = [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
            return sorted(name for name in names if not _exists(f"{name}/{ENDED}", tasks))

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int
    ) -> dict[str, Sequence[Entry]]:
        """Return the content of the next files of every task in the order of their names."""
        deadline, pause, load = time.monotonic() + wait, SHORTEST_PAUSE, _Loader(max_bytes)
        while True:
            with _opened(self._tasks) as tasks:
                found = {task: self._read_now(tasks, task, after[task] or "", count, load) for task in after}
            if any(found.values()) or time.monotonic() >= deadline:
                return found
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _read_now(self, tasks: int, task: str, after: str, count: int, load: "_Loader") -> Sequence[Entry]:
        found: list[Entry] = []
        last, check = split_position(after)
        with _opened_if_there(task, tasks) as folder:
            for name in self._names_after(folder, task, last, count):
                try:
                    data = load(f"{name}{SUFFIX}", folder)
                    found.append((name if isinstance(data, DataError) else checked(name, data), data))
                except FileNotFoundError:  # trimmed meanwhile
                    self._listings.pop(task, None)
                except OSError as error:
                    if error.errno not in UNREADABLE:
                        raise
                    reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
                    found.append((name, DataError(f"the file cannot be read: {reason}")))
            if found:  # not before: a stream that is reset from now on has not been read
                _check_message(folder, task, last, check)
        return found

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        """Write a file under the next number; of several publishers, every one gets a number of its own.

        A message that its publisher has appended before is dropped; the position of its last message is returned.
        """
        publisher, number = sequence_of(data) or ("", 0)
        with self._new_folder(task) as folder, _locked(folder, task, self._patience):
            if _exists(ENDED, folder):
                raise TaskError(f"task {task!r} has ended; start it again, or publish under another name")
            record = self._record(folder)
            stored, position = record.numbers.get(publisher, (-1, ""))
            if number <= stored:
                return str(position)
            name = _successor(record.last) if record.last else f"{first_number():0{DIGITS}}"
            position = checked(name, data)
            _write(f"{name}{SUFFIX}", data, folder)
            record.note(data, name, position)
            record.count += 1
            if keep is not None:
                record.count -= self._delete_oldest(folder, task, record.count - keep)
            record.write(folder)
        return position

    def backlog(self, task: str, after: str | None) -> int:
        """Return the number of files whose names sort after a position."""
        last, check = split_position(after or "")
        with self._folder(task) as folder:
            if folder is None:
                return 0
            if not last and (record := _Record.read(folder)).is_good(_time_of_change(folder)):
                return record.count
            names = self._names_up_to(folder, task, last)
            _check_message(folder, task, last, check)
            return len(names) - bisect_right(names, last)

    def trim(self, task: str, upto: str) -> None:
        """Delete files before a position; its own file stays, from which publishers continue the numbers."""
        last, check = split_position(upto)
        with self._folder(task) as folder:
            if folder is not None:
                names = self._names_up_to(folder, task, last)
                _check_message(folder, task, last, check)
                for name in names[: bisect_left(names, last)]:
                    _delete(f"{name}{SUFFIX}", folder)

    def end(self, task: str, after: str | None = None) -> bool:
        """Delete the files of a task and refuse others; with a position, only if none sorts after it."""
        with self._new_folder(task) as folder, _locked(folder, task, min(self._patience, END_SECONDS)):
            names = [name for name in _scan(folder) if name.endswith((SUFFIX, PARTIAL))]
            stored = max((name for name in names if name.endswith(SUFFIX)), default="")
            if after is not None and stored.removesuffix(SUFFIX) > split_position(after)[0]:
                return False
            _write(ENDED, b"", folder)
            for name in names:
                _delete(name, folder)
        return True

    def reopen(self, task: str) -> None:
        """Take files of a task again that has ended."""
        with self._folder(task) as folder:
            if folder is not None and _exists(ENDED, folder):
                with _locked(folder, task, self._patience):
                    _delete(ENDED, folder)

    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        """Keep the message under its name, and the reason beside it."""
        with self._folder(task) as folder:
            self._dead_letters.add(task, f"{split_position(position)[0]}{SUFFIX}", data, reason, folder)

    def close(self) -> None:
        """Do nothing: files are open only while they are read or written."""

    @contextmanager
    def _folder(self, task: str) -> Iterator[int | None]:
        """Open the folder of a task within the block; yield None if there is none."""
        with _opened(self._tasks) as tasks, _opened_if_there(task, tasks) as folder:
            yield folder

    @contextmanager
    def _new_folder(self, task: str) -> Iterator[int]:
        """Open the folder of a task within the block; make it if there is none."""
        with _opened(self._tasks) as tasks:
            with suppress(FileExistsError):
                os.mkdir(_file_name(task), dir_fd=tasks)
            with _opened(task, tasks) as folder:
                yield folder

    def _names_after(self, folder: int | None, task: str, start: str, count: int) -> list[str]:
        """Return up to ``count`` names after a position, without a gap."""
        if folder is None:
            return []
        listing = self._listings.get(task)
        if listing is None or not listing.names or listing.names[-1] <= start:
            listing = self._listing(folder, task)
        index = bisect_right(listing.names, start)
        return listing.names[index : index + count]

    def _names_up_to(self, folder: int, task: str, last: str) -> list[str]:
        """Return all names; raise an error if all are before the last one that was read."""
        for listing in (self._listing, self._new_listing):
            names = listing(folder, task).names
            if names and last <= names[-1]:
                return names
        if not names:
            return []
        raise ResetError(task, names[-1], last)

    def _listing(self, folder: int, task: str) -> _Listing:
        """Return the names in a folder, from memory where they are still good."""
        kept = self._listings.get(task)
        return kept if kept is not None and kept.is_good(_time_of_change(folder)) else self._new_listing(folder, task)

    def _new_listing(self, folder: int, task: str) -> _Listing:
        """List a folder twice, so that no name is missing before the last.

        A listing may miss a file that appears while it is made, and have one that appeared later. The second listing
        has all files that appeared before the last one of the first.
        """
        changed, made = _time_of_change(folder), time.time()
        last = max(_messages(_scan(folder)), default="")
        names = sorted(name for name in _messages(_scan(folder)) if name <= last)
        self._listings[task] = listing = _Listing(names, changed, made)
        return listing

    def _record(self, folder: int) -> _Record:
        """Return the record of the publishers, brought up to date; the caller holds the lock."""
        record = _Record.read(folder)
        if record.is_good(_time_of_change(folder)):
            return record
        made, entries = time.time(), _scan(folder)
        _delete_leftovers(entries, folder)  # nobody writes without the lock
        with suppress(FileNotFoundError), _opened(RECORDS, folder) as records:
            _delete_leftovers(_scan(records), records)
        names = _messages(entries)
        if not names:
            return _Record(made=made)  # a stream that begins anew, whatever was numbered before
        record.count, record.made, record.last = len(names), made, max(names)
        with suppress(OSError):  # a publisher may have been killed before it could note its last message
            head = _content(f"{record.last}{SUFFIX}", folder)
            record.note(head, record.last, f"{record.last}/{_check_of_file(record.last, folder)}")
        return record

    def _delete_oldest(self, folder: int, task: str, count: int) -> int:
        """Delete the oldest messages; return how many were there."""
        deleted = self._delete_known(folder, task, count)
        if deleted < count:  # other publishers have deleted what this one knew
            self._new_listing(folder, task)
            deleted += self._delete_known(folder, task, count - deleted)
        return deleted

    def _delete_known(self, folder: int, task: str, count: int) -> int:
        listing = self._listings.get(task)
        deleted = index = 0
        while listing is not None and deleted < count and index < len(listing.names):
            deleted += _delete(f"{listing.names[index]}{SUFFIX}", folder)
            index += 1
        if listing is not None and index:
            self._listings[task] = replace(listing, names=listing.names[index:])
        return deleted


def _open(path: str | Path, parent: int | None = None) -> int:
    """Open a folder; refuse a link, which could lead anywhere."""
    try:
        return os.open(path, FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise NotADirectoryError(
            error.errno, f"found a link or a file where a folder is expected: {str(path)!r:.250}; remove it"
        ) from None


@contextmanager
def _opened(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """Open a folder within the block."""
    folder = _open(path, parent)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _opened_if_there(task: str, tasks: int) -> Iterator[int | None]:
    """Open the folder of a task within the block; yield None if there is none."""
    try:
        folder = _open(_file_name(task), tasks)
    except FileNotFoundError:
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _locked(folder: int, task: str, seconds: float) -> Iterator[None]:
    """Keep other publishers of this class out of a folder within the block; wait for them for a limited time."""
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    try:
        deadline, pause = time.monotonic() + seconds, SHORTEST_PAUSE
        while not _takes(lock):
            if time.monotonic() >= deadline:
                raise HubError(
                    f"a publisher has held the lock of task {task!r} for {seconds:g} s; end it, or try again"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        yield
    finally:
        os.close(lock)


def _takes(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file_name(task: str) -> str:
    if "/" in task or task in ("", ".", ".."):
        raise TaskError(f"a folder cannot be named {task!r:.120}; take a name without slashes")
    return task


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _scan(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _messages(entries: list[str]) -> list[str]:
    """Return the names of the messages among the files of a folder."""
    return [name.removesuffix(SUFFIX) for name in entries if name.endswith(SUFFIX) and name[0] != "."]


def _delete(name: str, folder: int) -> bool:
    """Delete a file; return whether it was there."""
    try:
        os.unlink(name, dir_fd=folder)
    except (FileNotFoundError, IsADirectoryError):  # publishers of this class make no directories
        return False
    return True


def _delete_leftovers(entries: list[str], folder: int, seconds: float = 0.0) -> None:
    """Delete files that were being written by processes that were killed, if they are that old."""
    for name in entries:
        if name[0] == "." and name.endswith(PARTIAL):
            with suppress(FileNotFoundError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime <= time.time() - seconds:
                    _delete(name, folder)


def _write(name: str, data: bytes, folder: int, *, mode: int = 0o666, durable: bool = True) -> None:
    """Write a file that appears at once; one that is durable survives a power cut."""
    scratch = f".{_short(name)}.{secrets.token_hex(4)}{PARTIAL}"
    file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(file)
        os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _delete(scratch, folder)
        raise
    if durable:
        os.fsync(folder)


def _short(name: str) -> str:
    """Return a name as it is, or its beginning and hash where the name of a temporary file would become too long.

    >>> _short("photo"), len(_short("x" * 240))
    ('photo', 105)
    """
    if len(os.fsencode(name)) <= LONGEST_NAME:
        return name
    return f"{name[:40]}-{sha256(os.fsencode(name)).hexdigest()}"


def _time_of_change(folder: int) -> int:
    """Return when a file appeared in a folder or left it, in nanoseconds."""
    return os.fstat(folder).st_mtime_ns


def _content(name: str, folder: int) -> bytes:
    """Return the beginning of a file, up to a mebibyte."""
    file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)  # a pipe would wait for its writer
    try:
        return os.read(file, 2**20)
    finally:
        os.close(file)


def _check_message(folder: int | None, task: str, name: str, check: str) -> None:
    """Raise an error if a message is not the one that was read, or is missing although older messages are there."""
    if check and folder is not None:
        try:
            found = _check_of_file(name, folder)
        except FileNotFoundError:
            found = "" if any(each < name for each in _messages(_scan(folder))) else check
        if found != check:
            raise ResetError(task, None, name)


def _check_of_file(name: str, folder: int) -> str:
    file = os.open(f"{name}{SUFFIX}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
    try:
        return check_of(os.fstat(file).st_size, lambda start, count: os.pread(file, count, start))
    finally:
        os.close(file)


class _Loader:
    """Reads files, into memory that tensors may share.

    Every call of the system gives Python's lock away, to a thread that trains: of small files, these are the fewest.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._space = bytearray(USUAL_BYTES)

    def __call__(self, name: str, folder: int | None) -> Data | DataError:
        """Return the content of a file, or the error that it is too large."""
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
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


class _DeadLetters:
    """The newest dead letters of every task, in folders that only this user may enter.

    Args:
        path: the folder; tasks have folders in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._uncounted: dict[str, int] = {}

    def add(self, task: str, name: str, data: bytes, reason: str, source: int | None) -> None:
        """Keep a message and the reason.

        Args:
            task: its task.
            name: of its file.
            data: its content; empty where it was too large to be read.
            reason: why it cannot be learned.
            source: the folder where it was found, to link a file whose content was not read.
        """
        with _own_folder(self._path, None) as letters, _own_folder(task, letters) as folder:
            stem, suffix = Path(name).stem, Path(name).suffix
            kept = f"{_short(stem)}{suffix}"
            if data or not _link(name, source, kept, folder):
                _write(kept, data, folder, mode=0o600)
            _write(f"{_short(stem)}{REASON}", f"{reason}\n".encode(), folder, mode=0o600)
            self._uncounted[task] = self._uncounted.get(task, COUNTED_EVERY) + 1
            if self._uncounted[task] > COUNTED_EVERY:
                self._uncounted[task] = 0
                _discard_old(folder, suffix)


@contextmanager
def _own_folder(path: str | Path, parent: int | None) -> Iterator[int]:
    """Open a folder that only this user may enter within the block; make it if there is none."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=parent)
    with _opened(path, parent) as folder:
        if (owner := os.fstat(folder).st_uid) != os.geteuid():
            raise PermissionError(f"the folder of dead letters {path} belongs to user {owner}; remove it")
        os.fchmod(folder, 0o700)
        yield folder


def _link(name: str, source: int | None, kept: str, folder: int) -> bool:
    """Link a file, and return whether that was possible; a symbolic link, pipe or folder is not kept."""
    if source is None:
        return False
    with suppress(OSError):
        os.link(name, kept, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
    try:
        is_file = stat.S_ISREG(os.stat(kept, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
    if not is_file:
        os.unlink(kept, dir_fd=folder)
    return is_file


def _discard_old(folder: int, suffix: str) -> None:
    _delete_leftovers(_scan(folder), folder, LEFTOVER_SECONDS)
    with os.scandir(folder) as entries:
        reasons = sorted(
            (entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries if entry.name.endswith(REASON)
        )
    for _, name in reasons[:-MOST_DEAD_LETTERS]:
        _delete(f"{name.removesuffix(REASON)}{suffix}", folder)
        _delete(name, folder)
