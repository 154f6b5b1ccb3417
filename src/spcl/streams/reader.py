"""The queue of a source that is being read."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spcl.batches import as_batch, describe, number_of_samples
from spcl.errors import DataError
from spcl.sources import IterableSource, Message, Rejected, Source

__all__ = ["Failure", "Queues", "Reader"]

_END = object()


@dataclass(frozen=True)
class Failure:
    """The last exception of a source, its time (`time.time()`), and the number of exceptions so far."""

    exception: BaseException
    time: float
    count: int


@dataclass(frozen=True)
class Queues:
    """What the readers of a stream share.

    Attributes:
        capacity: the largest number of queued messages per source.
        lock: guards readers.
        changed: of the same lock; is notified of what the iterating thread may wait for.
        last_seen: when each source last yielded (`time.time()`).
    """

    capacity: int
    lock: threading.RLock
    changed: threading.Condition
    last_seen: dict[str, float]


class Reader:
    """The queue of a source, and how far it is read; all attributes are guarded by `Queues.lock`.

    Attributes:
        name: the source's name.
        source: what is read.
        queue: messages that were read and not delivered yet.
        after: the position up to which messages are queued or delivered.
        started: whether a moment has listed the source in `started`.
        awaited_since: when the thread began to wait for the next message; None while it does not.
        reading: whether a thread may still append; False once the source is exhausted or failed.
        failed: whether the source raised.
        stopped: whether the thread must stop reading it.
        has_space: the thread that reads it waits for this.
        low: so many queued messages, or fewer, let the thread read on.
    """

    def __init__(self, name: str, source: Source, started: bool, queues: Queues) -> None:
        self.name = name
        self.source = source
        self.queue: deque[Message | Rejected] = deque()
        self.after: str | None = None
        self.started = started
        self.awaited_since: float | None = None
        self.reading = True
        self.failed = False
        self.stopped = False
        self.has_space = threading.Condition(queues.lock)  # its own: of 64 readers, only this one is to wake up
        self.capacity = queues.capacity
        self.low = queues.capacity - 1
        self._changed = queues.changed
        self._last_seen = queues.last_seen

    @property
    def exhausted(self) -> bool:
        """Whether all batches are delivered and no more will come."""
        return not (self.reading or self.failed or self.queue)

    @property
    def can_be_read_again(self) -> bool:
        """Whether the source has positions that mean something after a crash."""
        return not isinstance(self.source, IterableSource)

    @property
    def rejects(self) -> bool:
        """Whether the next message is rejected."""
        return bool(self.queue) and isinstance(self.queue[0], Rejected)

    @property
    def has_batch(self) -> bool:
        """Whether the next message is a batch."""
        return bool(self.queue) and isinstance(self.queue[0], Message)

    @property
    def is_low(self) -> bool:
        """Whether it is time to read on."""
        return len(self.queue) <= self.low

    def start(self, after: str | None) -> None:
        """Note that a thread reads the source after a position."""
        self.failed, self.reading, self.after = False, True, after
        self.awaited_since = time.monotonic()

    def take(self) -> Message | Rejected:
        """Return the next message, and let the thread read on when it is time to."""
        message = self.queue.popleft()
        if self.is_low:
            self.has_space.notify()
        return message

    def stop(self) -> None:
        """Let the thread stop reading, and forget what is queued."""
        self.stopped = True
        self.queue.clear()
        self.has_space.notify()
        self.source.close()

    def put(self, messages: Sequence[Message | Rejected], after: str | None) -> None:
        """Queue messages, after which the source is read on from a position."""
        with self._changed:
            if self.stopped:
                return
            self.after = after
            if messages:
                was_empty = not self.queue
                self.queue.extend(messages)
                self.awaited_since = None
                self._last_seen[self.name] = time.time()
                if was_empty:  # others change nothing for the iterating thread
                    self._changed.notify_all()

    def read(self) -> None:
        """Read the source to its end, in a thread of its own."""
        messages = self.source.read(self.after)
        while self._wait_for_capacity() and (message := next(messages, _END)) is not _END:
            checked = _checked(message)
            self.put([checked], checked.position)

    def _wait_for_capacity(self) -> bool:
        with self.has_space:
            self.has_space.wait_for(lambda: self.stopped or self.is_low)
            self.awaited_since = time.monotonic()
            return not self.stopped


def _checked(message: object) -> Message | Rejected:
    """Return a message with a batch of tensors, or raise an error if it has none."""
    if isinstance(message, Rejected):
        return message
    if not isinstance(message, Message):
        raise DataError(f"the source yielded a {type(message).__name__}; yield a Message with position and batch")
    x, y = as_batch(message.batch)
    if y.dim() == 0 or not number_of_samples(x) == len(y) > 0:
        shape = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else describe(x)
        raise DataError(f"the source yielded x {shape} and y of shape {tuple(y.shape)}; yield one y per x")
    return Message(message.position, (x, y))
