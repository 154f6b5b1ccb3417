"""What a hub is: a place where tasks have streams of messages."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from spcl.errors import TaskError
from spcl.registry import Registry
from spcl.sources.base import Entry

__all__ = ["HUBS", "Hub", "check_task_name", "first_number"]


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
        """Return up to ``count`` messages of every task, with their positions, that come after its given position.

        Tasks that have none may be left out. If none has any, wait at most so many seconds for the first. Of a message
        that cannot be read, or has more than ``max_bytes``, the error may stand instead.
        """
        ...

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        """Add a message exactly once and return its position; keep only the newest ``keep``, if that is given."""
        ...

    def backlog(self, task: str, after: str | None) -> int:
        """Return the number of messages after a position, or of all that are stored.

        Raise a :class:`spcl.sources.ResetError` if the newest message ever stored is before the position.
        """
        ...

    def trim(self, task: str, upto: str) -> None:
        """Delete messages up to a position; the last of them may stay.

        Raise a :class:`spcl.sources.ResetError`, and delete nothing, if the newest ever stored is before the position.
        """
        ...

    def end(self, task: str) -> None:
        """Delete the stream of a task and refuse further messages; repeating it changes nothing."""
        ...

    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        """Keep a message that cannot be learned, with the reason; repeating it for a position changes nothing.

        Within a task, positions ascend.
        """
        ...

    def close(self) -> None:
        """Close connections, if there are any; the next call of another method opens them again."""
        ...


HUBS: Registry[Callable[..., Hub]] = Registry("source", Hub)
"""Hubs by name: factory(\\*\\*options) → :class:`Hub`."""


def first_number() -> int:
    """Return the number of the first message of a stream: milliseconds since 1970.

    A stream that was deleted and begins anew so goes on after all its positions in checkpoints.
    """
    return int(1000 * time.time())


def check_task_name(name: object) -> str:
    """Return the name of a task, or raise an error if it cannot be the name of a file or a key.

    >>> check_task_name("../camera")
    Traceback (most recent call last):
    ...
    spcl.errors.TaskError: a task cannot be named '../camera'; take up to 100 letters, digits, '_', '-' and '.', which
    is not the first
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]{0,99}", name) or name == "memory":
        raise TaskError(
            f"a task cannot be named {name!r:.120}; take up to 100 letters, digits, '_', '-' and '.', which is not the "
            f"first" + (" ('memory' is reserved)" if name == "memory" else "")
        )
    return name
