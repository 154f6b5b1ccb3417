"""The stream of a task in a hub as a source, and reading many of them by one call."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spcl.errors import DataError, TaskError
from spcl.sources.base import Entry, Message, Rejected, ResetError
from spcl.sources.hub import Hub
from spcl.sources.schema import Schema
from spcl.sources.wire import MAX_BYTES, decode

__all__ = ["WAIT_SECONDS", "Excerpt", "Found", "HubReader", "HubSource"]

READ_AHEAD = 8  # messages per call
WAIT_SECONDS = 0.25  # longest wait of a call, so that closing takes no longer
FIRST_DELAY = 0.05
CONNECTION_ERRORS = (ConnectionError, TimeoutError)  # of all tasks: to ask for each alone would take a timeout each

_log = logging.getLogger(__name__)

Found = Sequence[Entry]
"""Messages as they are stored, with their positions."""


@dataclass(frozen=True, eq=False)
class Excerpt:
    """The next messages of a stream.

    Attributes:
        messages: batches, and what is none.
        after: the position to read on from.
        ended: whether the task has ended.
    """

    messages: Sequence[Message | Rejected]
    after: str | None
    ended: bool = False


class HubSource:
    """The stream of one task in a hub: announcements are understood, batches checked against the task's schema.

    Batches wait until the task's schema is known: from an announcement, from :meth:`announce` or, on first sight, from
    the first batch. While the hub cannot be reached, reading is tried again and again; a stream that was reset is left
    as it is.

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

    Attributes:
        is_out: whether the stream cannot be read now, or was reset.
        quiet_at: when the hub last answered that there is no new message (``time.monotonic()``).
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
        self.hub = hub
        self.task = task
        self.max_bytes = max_bytes
        self.is_out = False
        self.quiet_at = -math.inf
        self._inputs = inputs
        self._first_sight = first_sight
        self._trim = trim or hub.trim
        self._on_outage = on_outage or _log_outage
        self._schema = schema
        self._is_waiting = False
        self._is_lost = False
        self._reading: object = None  # stands for the one call of read that goes on
        self._changed = threading.Condition()

    @property
    def schema(self) -> Schema | None:
        """The task's schema, once it is known."""
        return self._schema

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be read now: a batch waits for the task's schema, or the stream was reset."""
        return self._is_lost or (self._is_waiting and self._schema is None)

    def announce(self, schema: Schema) -> None:
        """Let batches in that fit; an error if the task is known to be another."""
        with self._changed:
            if self._schema not in (None, schema):
                raise TaskError(f"task {self.task!r} is announced as {schema}, but it is {self._schema}")
            self._schema = schema
            self._changed.notify_all()

    def read(self, after: str | None) -> Iterator[Message | Rejected]:
        """Yield batches, and what is none, after a position; end with the announcement that the task has ended.

        A second call ends the first.
        """
        this = self._reading = object()
        reader = HubReader(self.hub)
        while self._reading is this:
            found = reader.read({self: after}, READ_AHEAD, WAIT_SECONDS).get(self)
            if found is None:
                self._wait(lambda: self._reading is not this, FIRST_DELAY)
                continue
            excerpt = self.open(after, found)
            for message in excerpt.messages:
                if self._reading is not this:
                    return
                yield message
            if excerpt.ended:
                return
            after = excerpt.after
            self._wait(lambda: self._reading is not this or not self.is_paused)

    def commit(self, upto: str) -> None:
        """Let the hub delete messages, unless the stream was reset; while it cannot be reached, the next call does."""
        if not self._is_lost:
            try:
                self._trim(self.task, upto)
            except ResetError as error:
                self.lose(error)
            except OSError as error:
                _log.warning("source of %r: %s", self.task, error)

    def close(self) -> None:
        """End reading, at the latest after a quarter of a second."""
        with self._changed:
            self._reading = None
            self._changed.notify_all()

    def report(self, error: Exception | None) -> None:
        """Report once that the stream cannot be read, and once that it can again."""
        if (error is not None) == self.is_out:
            return
        with self._changed:
            if not self._is_lost:
                self.is_out = error is not None
                self._on_outage(self.task, error)

    def lose(self, error: ResetError) -> None:
        """Neither read nor delete messages from now on: the stream is not the one that was read before."""
        with self._changed:
            if not self._is_lost:
                self._is_lost = self.is_out = True
                self._on_outage(self.task, error)

    def open(self, after: str | None, found: Found) -> Excerpt:
        """Decode and check the messages found after a position, up to one that must wait for the schema."""
        messages: list[Message | Rejected] = []
        for position, data in () if self._is_lost else found:
            try:
                if isinstance(data, DataError):
                    raise data
                letter = decode(data, self.max_bytes)
                if letter.content == "end":
                    return Excerpt(messages, position, ended=True)
                if letter.schema is not None and letter.schema is not self._schema:
                    self.announce(letter.schema)
                if letter.batch is not None:
                    schema = self._schema or self._schema_on_first_sight(letter.batch)
                    if schema is None:
                        self._is_waiting = True
                        break
                    messages.append(Message(position, schema.fit(letter.batch, self._inputs)))
            except Exception as error:  # a message from anywhere: whatever it causes, the next ones are to be read
                content = bytes(data) if isinstance(data, bytes | bytearray) else b""
                messages.append(Rejected(position, content, str(error) or repr(error)))
            after = position
        return Excerpt(messages, after)

    def _schema_on_first_sight(self, batch: Any) -> Schema | None:
        if (sight := self._first_sight) is not None:
            self.announce(Schema.inferred(batch) if isinstance(sight, str) else sight)
        return self._schema

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        if not condition():
            with self._changed:
                self._changed.wait_for(condition, seconds)


class HubReader:
    """Reads the streams of several tasks of a hub by one call; one that cannot be read does not stop the others.

    Args:
        hub: the hub of all sources.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def read(self, after: Mapping[HubSource, str | None], count: int, wait: float) -> dict[HubSource, Found]:
        """Return up to ``count`` messages of every source after its position, without a source that cannot be read.

        If there are none, wait at most so many seconds for the first.
        """
        positions = {source.task: position for source, position in after.items()}
        try:
            found = self._hub.read(positions, count, wait, max(source.max_bytes for source in after))
            for task, entries in found.items():
                _check_positions(task, entries)
        except Exception as error:  # of any broker; a source that stopped reading would lose batches
            if len(after) > 1 and not isinstance(error, CONNECTION_ERRORS):
                alone = [self.read({source: position}, count, 0.0) for source, position in after.items()]
                return {source: excerpt for each in alone for source, excerpt in each.items()}
            for source in after:
                source.report(error)
            return {}
        for source in after:
            source.report(None)
            if not found.get(source.task):
                source.quiet_at = time.monotonic()
        return {source: found.get(source.task, ()) for source in after}


def _check_positions(task: str, entries: Found) -> None:
    """Refuse entries without a position: nobody could go on after them."""
    for position, _ in entries:
        if not isinstance(position, str):
            raise TypeError(f"the hub returned the position {position!r:.80} for task {task!r}; return a str")


def _log_outage(task: str, error: Any) -> None:
    _log.warning("source of %r: %s", task, error or "reachable again")
