"""The stream of a task in a hub as a source, and reading many of them by one call."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from spcl._util.registry import Named
from spcl.batches import Batch, Inputs, describe, map_leaves
from spcl.errors import DataError, TaskError
from spcl.sources.base import Entry, Hub, Message, Rejected, ResetError, check_sizes
from spcl.sources.wire import MAX_BYTES, Announcement, decode
from spcl.tasks import TaskDescription

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
        messages: batches, and messages that are refused.
        after: the position to read on from.
        ended: whether the task has ended.
    """

    messages: Sequence[Message | Rejected]
    after: str | None
    ended: bool = False


class HubSource:
    """The stream of one source in a hub: announcements are understood, batches are checked against the task.

    Batches wait until it is known what the task of the source predicts: from an announcement, from :meth:`announce` or,
    on first sight, from the first batch. While the hub cannot be reached, reading is tried again and again; a stream
    that was reset is left as it is.

    Args:
        hub: the hub.
        task: the name of the source: of its task, too, unless it is announced for another one.
        inputs: type and shape of one sample, as :func:`spcl.batches.describe` gives them.
        description: what its task predicts, if that is known.
        answers: the name of its task where no announcement says it.
        encoder: the name of its encoder, or its name and options, where no announcement says it.
        check: called with what the source answers before that is settled; may raise an error.
        first_sight: what a task predicts whose first batch comes without an announcement, ``"infer"`` to take it from
            the batch, or None to wait for an announcement.
        max_bytes: the largest message.
        trim: called as ``trim(task, upto)`` to delete messages; by default the hub's own.
        on_outage: called as ``on_outage(task, error)`` when the hub cannot be reached or does not answer, and with None
            when it can be reached again; from the reading or the iterating thread.

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
        description: TaskDescription | None = None,
        answers: str | None = None,
        encoder: Named | None = None,
        check: Callable[[Announcement], object] | None = None,
        first_sight: TaskDescription | Literal["infer"] | None = None,
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
        self._answers = answers or task
        self._encoder = encoder
        self._check = check
        self._description = None if description is None else replace(description, name=self._answers)
        self._announced: Announcement | None = None  # the latest one that was settled
        self._is_waiting = False
        self._is_lost = False
        self._reading: object = None  # stands for the latest call of read
        self._changed = threading.Condition()

    @property
    def description(self) -> TaskDescription | None:
        """What the task of the source predicts, once it is known; with the task's name."""
        return self._description

    @property
    def encoder(self) -> Named | None:
        """The name of the encoder, or its name and options; final once the description is known."""
        return self._encoder

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be read now: a batch waits for an announcement, or the stream was reset."""
        return self._is_lost or (self._is_waiting and self._description is None)

    def announce(self, announced: Announcement) -> None:
        """Say what the source answers; raise an error if it is known to answer something else."""
        task, encoder = announced.task, self._encoder if announced.encoder is None else announced.encoder
        if task.name == announced.source:  # it does not say so
            task = replace(task, name=self._answers)
        with self._changed:
            if self._description is None:
                if self._check is not None:
                    self._check(Announcement(self.task, task, encoder))
                self._encoder, self._answers, self._description = encoder, task.name, task
            elif (self._description, self._encoder) != (task, encoder):
                known = Announcement(self.task, self._description, self._encoder)
                raise TaskError(
                    f"source {self.task!r} is announced as {Announcement(self.task, task, encoder)}, but it is {known}"
                )
            self._changed.notify_all()

    def read(self, after: str | None) -> Iterator[Message | Rejected]:
        """Yield batches and refused messages after a position; end with the announcement that the task has ended.

        A second call ends the first.
        """
        this = self._reading = object()
        reader = HubReader(self.hub)
        while self._reading is this:
            self._wait(lambda: self._reading is not this or not self.is_paused)
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
        """Decode and check messages that were read after a position, up to one that must wait for an announcement."""
        messages: list[Message | Rejected] = []
        for position, data in () if self._is_lost else found:
            try:
                if isinstance(data, DataError):
                    raise data
                letter = decode(data, self.max_bytes, self.task)
                if letter.content == "end":
                    return Excerpt(messages, position, ended=True)
                if letter.announced is not None and letter.announced is not self._announced:
                    self.announce(letter.announced)
                    self._announced = letter.announced
                if letter.batch is not None:
                    if (task := self._description or self._seen_first(letter.batch)) is None:
                        self._is_waiting = True
                        break
                    messages.append(Message(position, _fitting(letter.batch, self._inputs, task)))
            except Exception as error:  # whatever an untrusted message causes, the next messages must be read
                content = bytes(data) if isinstance(data, bytes | bytearray) else b""
                messages.append(Rejected(position, content, str(error) or repr(error)))
            after = position
        return Excerpt(messages, after)

    def _seen_first(self, batch: Batch) -> TaskDescription | None:
        if (sight := self._first_sight) is not None:
            task = TaskDescription.inferred(self.task, batch[1]) if isinstance(sight, str) else sight
            self.announce(Announcement(self.task, replace(task, name=self.task)))
        return self._description

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        if not condition():
            with self._changed:
                self._changed.wait_for(condition, seconds)


def _fitting(batch: Batch, inputs: str, task: TaskDescription) -> Batch:
    """Return a batch in the types that a learner trains on, or raise an error that says what is wrong with it."""
    x, y = batch
    check_sizes(x, y)
    return _fitting_inputs(x, inputs), task.fit(y)


def _fitting_inputs(x: Inputs, expected: str) -> Inputs:
    """Return inputs of the expected type and shape; NumPy's default of 64 bits is converted."""
    if describe(x, 1) == expected:
        return x
    x = map_leaves(lambda leaf: leaf.float() if leaf.dtype == torch.float64 else leaf, x)
    if (found := describe(x, 1)) != expected:
        raise DataError(f"a sample is {found:.200}, and the learner expects {expected}; convert it")
    return x


class HubReader:
    """Reads the streams of several tasks of a hub by one call; one that cannot be read does not stop the others.

    Args:
        hub: the hub of all sources.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def read(self, after: Mapping[HubSource, str | None], count: int, wait: float) -> dict[HubSource, Found]:
        """Return up to ``count`` messages of every source after its position, without a source that cannot be read.

        If there are none, wait at most ``wait`` seconds for the first.
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
                if isinstance(error, ResetError):
                    source.lose(error)
                else:
                    source.report(error)
            return {}
        for source in after:
            source.report(None)
            if not found.get(source.task):
                source.quiet_at = time.monotonic()
        return {source: found.get(source.task, ()) for source in after}


def _check_positions(task: str, entries: Found) -> None:
    """Refuse entries without a position: nobody could read on after them."""
    for position, _ in entries:
        if not isinstance(position, str):
            raise TypeError(f"the hub returned the position {position!r:.80} for task {task!r}; return a str")


def _log_outage(task: str, error: Any) -> None:
    _log.warning("source of %r: %s", task, error or "reachable again")
