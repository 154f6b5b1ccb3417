"""What a source is: messages with positions, read again after a crash from the position in the checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from spcl.batches import Batch
from spcl.errors import DataError

__all__ = ["Data", "Entry", "HubError", "Message", "Rejected", "ResetError", "Source"]

Data = bytes | bytearray
"""A message: bytes, or a bytearray of its own, which the tensors in it then share instead of copying it."""

Entry = tuple[str, Data | DataError]
"""The position of a message, and its bytes, or why they cannot be read."""


class HubError(ConnectionError):
    """A hub that cannot be reached now, but may be later."""


class ResetError(OSError):
    """A stream that ends before the position up to which it was read: it was deleted, or lost its end in a crash.

    >>> print(ResetError("camera", "8", "11"))
    the stream of task 'camera' ends at 8, but it was learned up to 11, so it was reset, and its new messages are not
    learned; restore it and start again, or finish the task and publish under another name
    """

    def __init__(self, task: str, end: str, position: str) -> None:
        super().__init__(
            f"the stream of task {task!r} ends at {end}, but it was learned up to {position}, so it was reset, and its "
            f"new messages are not learned; restore it and start again, or finish the task and publish under another "
            f"name"
        )


@dataclass(frozen=True, eq=False)
class Message:
    """A batch and its position in the stream of its task."""

    position: str
    batch: Batch


@dataclass(frozen=True)
class Rejected:
    """A message that is no batch of its task, its position, its bytes and the reason."""

    position: str
    data: bytes
    reason: str


@runtime_checkable
class Source(Protocol):
    """Batches of one task that can be read again from any position that was not committed."""

    def read(self, after: str | None) -> Iterator[Message | Rejected]:
        """Return the messages after a position, or all; wait for the next, and end when the task has ended."""
        ...

    def commit(self, upto: str) -> None:
        """Allow the messages up to a position to be deleted: they will not be read again."""
        ...

    def close(self) -> None:
        """Let :meth:`read` end as soon as it can; called from another thread."""
        ...
