"""What a source and a hub are: messages with positions, from which they are read again after a crash."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from spcl._util.registry import Registry
from spcl.batches import Batch, Inputs, describe, number_of_samples
from spcl.errors import DataError, SpclError, TaskError

MOST_NAME_BYTES = 200
"""The longest name of a task in UTF-8: a file system takes 255 bytes."""

BLOCK = 500  # bytes; four blocks are too few for hashlib to release the GIL, which is slow to get back from training

Data = bytes | bytearray
"""A message: bytes, or a bytearray of its own, which the tensors in it then share instead of copying it."""

Entry = tuple[str, Data | DataError]
"""The position of a message, and its bytes, or why they cannot be read."""


class HubError(ConnectionError):
    """A hub that cannot be reached now, but may be later."""


class ResetError(OSError):
    """A stream that is not the one that was read: it was deleted, or lost its end in a crash.

    Args:
        task: its task.
        end: the position where it ends, if that is before the position up to which it was read; None if the message at
            that position is another one, or is missing although older messages are stored.
        position: up to which it was read.

    >>> print(ResetError("camera", "8", "11"))
    the stream of task 'camera' ends at 8, but it was learned up to 11, so it was reset, and its new messages are not
    learned; restore it and start again, or finish the task and publish under another name
    >>> print(ResetError("camera", None, "11/0f4d…"))
    the stream of task 'camera' does not have the message at 11 that was learned, so it was reset, and its new messages
    are not learned; restore it and start again, or finish the task and publish under another name
    """

    def __init__(self, task: str, end: str | None, position: str) -> None:
        name, _ = split_position(position)
        found = f"does not have the message at {name} that was learned"
        if end is not None:
            found = f"ends at {split_position(end)[0]}, but it was learned up to {name}"
        super().__init__(
            f"the stream of task {task!r} {found}, so it was reset, and its new messages are not learned; restore it "
            f"and start again, or finish the task and publish under another name"
        )


def check_of(size: int, read: Callable[[int, int], bytes | bytearray]) -> str:
    """Return a short digest of a message: of its size, its beginning, its middle and its end.

    Args:
        size: of the message in bytes.
        read: called as ``read(start, count)``.
    """
    digest = blake2b(size.to_bytes(8, "little"), digest_size=8)
    if size <= 4 * BLOCK:
        digest.update(read(0, size))
    else:
        for start, count in ((0, BLOCK), (size // 2 - BLOCK, 2 * BLOCK), (size - BLOCK, BLOCK)):
            digest.update(read(start, count))
    return digest.hexdigest()


def checked(position: str, data: Data) -> str:
    """Return a position with a check of the message at it, by which a stream that was reset is noticed.

    >>> checked("11", b"a message")
    '11/921c4c5824a53501'
    """
    return f"{position}/{check_of(len(data), lambda start, count: data[start : start + count])}"


def split_position(position: str) -> tuple[str, str]:
    """Return a position without its check, and the check, which is empty in positions of earlier versions.

    >>> split_position("11/921c4c5824a53501"), split_position("11")
    (('11', '921c4c5824a53501'), ('11', ''))
    """
    name, _, check = position.partition("/")
    return name, check


@dataclass(frozen=True, eq=False)
class Message:
    """A batch and its position in the stream of its task."""

    position: str
    batch: Batch


@dataclass(frozen=True)
class Rejected:
    """A message that cannot be learned as a batch of its task: its position, its bytes and the reason."""

    position: str
    data: bytes
    reason: str


def check_sizes(x: Inputs, y: Tensor) -> None:
    """Raise a :class:`~spcl.errors.DataError` unless a batch has samples, and one target for each."""
    if y.dim() == 0 or not number_of_samples(x) == len(y) > 0:
        raise DataError(f"the inputs are {describe(x)} and the targets {describe(y)}; give one target per sample")


@runtime_checkable
class Source(Protocol):
    """Batches of one task that can be read again from any position that was not committed."""

    def read(self, after: str | None) -> Iterator[Message | Rejected]:
        """Yield the messages after a position, or all for None; wait for the next, and stop when the task ends."""
        ...

    def commit(self, upto: str) -> None:
        """Allow the messages up to a position to be deleted: they will not be read again."""
        ...

    def close(self) -> None:
        """Let :meth:`read` end as soon as it can; called from another thread."""
        ...


class IterableSource:
    """A source that cannot be read again: the caller skips the batches before a position.

    >>> [message.position for message in IterableSource(["batch", "batch"]).read(after="7")]
    ['8', '9']
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def read(self, after: str | None) -> Iterator[Message]:
        """Number the batches that the iterable yields."""
        # No generator: it would turn a StopIteration that `iter` raises into another error.
        return map(Message, map(str, count(int(after or 0) + 1)), iter(self._iterable))

    def commit(self, upto: str) -> None:
        """Do nothing: what was yielded is gone."""

    def close(self) -> None:
        """Do nothing: an iterator cannot be interrupted."""


def as_source(given: Source | Iterable[Any]) -> Source:
    """Return a source as it is, and an iterable as an :class:`IterableSource`.

    >>> as_source(lambda: [])
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: a source must be an iterable of batches, but it is a function; give what it returns
    """
    if isinstance(given, Source):
        return given
    if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        advice = "give what it returns" if callable(given) else "give a DataLoader, a generator or a list"
        raise SpclError(f"a source must be an iterable of batches, but it is a {type(given).__name__}; {advice}")
    return IterableSource(given)


# -- hubs


@runtime_checkable
class Hub(Protocol):
    """Streams of messages by task. Positions are texts; only the hub compares them.

    Methods raise a :class:`spcl.sources.HubError` while the hub cannot be reached, and another :class:`OSError` if it
    refuses. They are called from several threads.
    """

    def tasks(self) -> list[str]:
        """Return the tasks that have a stream and have not ended, sorted."""
        ...

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int
    ) -> dict[str, Sequence[Entry]]:
        """Return, for every task, up to ``count`` messages after its given position, each with its own position.

        Tasks without new messages may be left out. If no task has a new message, wait up to ``wait`` seconds for one.
        For a message that cannot be read, or has more than ``max_bytes``, return the error in its place. Raise a
        :class:`spcl.sources.ResetError` if the message at a given position is not the one that was read.
        """
        ...

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        """Add a message and return its position; keep only the newest ``keep``, if that is given.

        Drop a message whose :func:`spcl.sources.sequence_of` is not after the last of its publisher: it was appended
        before. A hub that cannot tell stores it again.
        """
        ...

    def backlog(self, task: str, after: str | None) -> int:
        """Return the number of messages after a position, or of all stored messages for None.

        Raise a :class:`spcl.sources.ResetError` if the stream ends before the position, or has another message there.
        """
        ...

    def trim(self, task: str, upto: str) -> None:
        """Delete messages up to a position; the message at the position itself may stay.

        Raise a :class:`spcl.sources.ResetError`, and delete nothing, where :meth:`backlog` would.
        """
        ...

    def end(self, task: str, after: str | None = None) -> bool:
        """Delete the stream of a task and refuse further messages; repeating it changes nothing.

        With a position, only if no message is stored after it. Return whether the stream has ended.
        """
        ...

    def reopen(self, task: str) -> None:
        """Take messages of a task again that has ended, at positions after its old ones; else change nothing."""
        ...

    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        """Keep a message that cannot be learned, with the reason; repeating it for a position changes nothing.

        Calls for one task come in the order of their positions.
        """
        ...

    def close(self) -> None:
        """Close connections, if there are any; the next call of another method opens them again."""
        ...


HUBS: Registry[Callable[..., Hub]] = Registry("source", Hub)
"""Hubs by name: factory(\\*\\*options) → :class:`Hub`."""


def first_number() -> int:
    """Return the number of the first message of a stream: milliseconds since 1970.

    So the numbers of a stream that was deleted and begins anew come after all its positions in checkpoints.
    """
    return int(1000 * time.time())


def check_task_name(name: object) -> str:
    """Return the name of a task, or raise an error if it cannot be the name of a file or a key.

    >>> check_task_name("../camera")
    Traceback (most recent call last):
    ...
    spcl.errors.TaskError: a task cannot be named '../camera'; take up to 100 letters, digits, '_', '-' and '.', which
    is not the first, of at most 200 bytes
    """
    fits = isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]{0,99}", name) and len(name.encode()) <= MOST_NAME_BYTES
    if not isinstance(name, str) or not fits or name == "memory":
        raise TaskError(
            f"a task cannot be named {name!r:.120}; take up to 100 letters, digits, '_', '-' and '.', which is not the "
            f"first, of at most {MOST_NAME_BYTES} bytes" + (" ('memory' is reserved)" if name == "memory" else "")
        )
    return name
