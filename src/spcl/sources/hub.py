"""What a hub is: a place where tasks have streams of messages; and a source that reads one of them."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

from spcl.batches import Batch
from spcl.errors import DataError, TaskError
from spcl.registry import Registry
from spcl.sources.base import Message, Rejected
from spcl.sources.schema import Schema
from spcl.sources.wire import MAX_BYTES, Letter, decode

__all__ = ["HUBS", "Hub", "HubSource", "check_task_name"]

TURN = threading.Lock()
"""Held while a message is decoded: threads that decode at the same time only take Python's own lock from each other."""

READ_AHEAD = 8  # messages per call: few, since those of 64 sources are in memory at once
WAIT_SECONDS = 0.25  # longest wait of a call, so that closing takes no longer
FIRST_DELAY = 0.05
LONGEST_DELAY = 5.0


@runtime_checkable
class Hub(Protocol):
    """Streams of messages by task. Positions are texts; only the hub compares them.

    Methods raise a :class:`spcl.sources.HubError` or another :class:`OSError` while the hub cannot be reached. They are
    called from several threads.
    """

    def tasks(self) -> list[str]:
        """Return the tasks that have a stream and have not ended, sorted."""
        ...

    def read(self, task: str, after: str | None, count: int, wait: float) -> list[tuple[str, bytes]]:
        """Return up to ``count`` next messages with their positions; wait at most so many seconds for the first."""
        ...

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        """Add a message exactly once and return its position; keep only the newest ``keep``, if that is given."""
        ...

    def backlog(self, task: str, after: str | None) -> int:
        """Return the number of messages after a position, or of all that are stored."""
        ...

    def trim(self, task: str, upto: str) -> None:
        """Delete messages up to a position; the last of them may stay."""
        ...

    def end(self, task: str) -> None:
        """Delete the stream of a task and refuse further messages; repeating it changes nothing."""
        ...

    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        """Keep a message that cannot be learned, with the reason; repeating it for a position changes nothing.

        Within a task, positions ascend.
        """
        ...


HUBS: Registry[Callable[..., Hub]] = Registry("source", Hub)
"""Hubs by name: factory(\\*\\*options) → :class:`Hub`."""


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


class HubSource:
    """The stream of one task in a hub: announcements are understood, batches checked against the task's schema.

    Batches wait until the task's schema is known: from an announcement, from :meth:`announce` or, on first sight, from
    the first batch. While the hub cannot be reached, reading is tried again and again.

    Args:
        hub: the hub.
        task: the task's name.
        inputs: type and shape of one sample, as :func:`spcl.batches.describe` gives them.
        schema: of the task, if it is known.
        first_sight: the schema of a task whose first batch comes without one, ``"infer"`` for that of the batch, or
            None to wait for an announcement.
        max_bytes: the largest message.
        trim: called as ``trim(task, upto)`` to delete messages; by default the hub's own.
        on_outage: called as ``on_outage(task, error)`` from the reading thread when the hub cannot be reached, and with
            None when it can again.
    """

    def __init__(
        self,
        hub: Hub,
        task: str,
        inputs: str,
        *,
        schema: Schema | None = None,
        first_sight: Schema | Literal["infer"] | None = None,
        max_bytes: int = MAX_BYTES,
        trim: Callable[[str, str], object] | None = None,
        on_outage: Callable[[str, Exception | None], object] | None = None,
    ) -> None:
        self._hub = hub
        self._task = task
        self._inputs = inputs
        self._first_sight = first_sight
        self._max_bytes = max_bytes
        self._trim = trim or hub.trim
        self._on_outage = on_outage or _log_outage
        self._schema = schema
        self._reading: object = None  # stands for the one call of read that goes on
        self._changed = threading.Condition()

    @property
    def schema(self) -> Schema | None:
        """The task's schema, once it is known."""
        return self._schema

    def announce(self, schema: Schema) -> None:
        """Let batches in that fit; an error if the task is known to be another."""
        with self._changed:
            if self._schema not in (None, schema):
                raise TaskError(f"task {self._task!r} is announced as {schema}, but it is {self._schema}")
            self._schema = schema
            self._changed.notify_all()

    def read(self, after: str | None) -> Iterator[Message | Rejected]:
        """Yield batches, and what is none, after a position; end with the announcement that the task has ended.

        A second call ends the first.
        """
        this = self._reading = object()
        while self._reading is this:
            for position, data in self._next(after, this):
                after = position
                try:
                    with TURN:
                        letter = decode(data, self._max_bytes)
                    if letter.content == "end":
                        return
                    batch = self._accept(letter, this)
                except (DataError, TaskError) as error:
                    yield Rejected(position, data, str(error))
                else:
                    if self._reading is not this:
                        return
                    if batch is not None:
                        yield Message(position, batch)

    def commit(self, upto: str) -> None:
        """Let the hub delete messages."""
        self._trim(self._task, upto)

    def close(self) -> None:
        """End reading, at the latest after a quarter of a second."""
        with self._changed:
            self._reading = None
            self._changed.notify_all()

    def _next(self, after: str | None, this: object) -> list[tuple[str, bytes]]:
        """Return the next messages, if need be after the hub has come back; none when closed or none came."""
        delay, failed = FIRST_DELAY, False
        while self._reading is this:
            try:
                found = self._hub.read(self._task, after, READ_AHEAD, WAIT_SECONDS)
            except Exception as error:  # of any broker; a source that stopped reading would lose batches
                if not failed:
                    self._on_outage(self._task, error)
                failed = True
                self._wait(lambda: self._reading is not this, delay)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                if failed:
                    self._on_outage(self._task, None)
                return found
        return []

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(condition, seconds)

    def _accept(self, letter: Letter, this: object) -> Batch | None:
        """Return a batch that fits; None for an announcement, or when closed while no schema is known."""
        if letter.schema is not None:
            self.announce(letter.schema)
        if letter.batch is None:
            return None
        if self._schema is None and self._first_sight is not None:
            sight = self._first_sight
            self.announce(Schema.inferred(letter.batch) if isinstance(sight, str) else sight)
        self._wait(lambda: self._reading is not this or self._schema is not None)
        with TURN:
            return None if self._schema is None else self._schema.fit(letter.batch, self._inputs)


def _log_outage(task: str, error: Any) -> None:
    logging.getLogger(__name__).warning("source of %r: %s", task, error or "reachable again")
