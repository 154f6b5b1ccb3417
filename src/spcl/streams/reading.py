"""The threads that read sources into queues: one for all tasks of a hub, and one for every other source."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spcl.batches import as_batch
from spcl.errors import DataError
from spcl.sources import Found, Hub, HubError, HubReader, HubSource, IterableSource, Message, Rejected, Source
from spcl.sources.base import check_sizes
from spcl.sources.reader import WAIT_SECONDS

SHORTEST_PAUSE = 0.002
HANGING_SECONDS = 30.0  # after which a hub that does not answer is reported
_END = object()


@dataclass(frozen=True)
class Failure:
    """The last exception of a source, its time (`time.time()`), and the number of exceptions so far."""

    exception: BaseException
    time: float
    count: int


class Queue:
    """The messages of a source that were read and not delivered yet; `Readers.lock` guards all attributes.

    Attributes:
        name: the source's name.
        source: what is read.
        messages: read and not delivered.
        after: the position up to which messages are queued or delivered.
        started: whether a moment has listed the source in `started`.
        awaited_since: when the thread began to wait for the next message; None while it does not wait.
        reading: whether a thread may still append; False once the source is exhausted or failed.
        failed: whether the source raised.
        stopped: whether the thread must stop reading it.
        has_space: the thread that reads the source waits for this condition.
        low: the thread reads on when at most `low` messages are queued.
    """

    def __init__(self, name: str, source: Source, started: bool, readers: "Readers") -> None:
        self.name = name
        self.source = source
        self.messages: deque[Message | Rejected] = deque()
        self.after: str | None = None
        self.started = started
        self.awaited_since: float | None = None
        self.reading = True
        self.failed = False
        self.stopped = False
        self.has_space = threading.Condition(readers.lock)  # its own: of 64 threads, only this one is to wake up
        self.capacity = readers.capacity
        self.low = readers.capacity - 1
        self._changed = readers.changed
        self._last_seen = readers.last_seen

    @property
    def exhausted(self) -> bool:
        """Whether all batches are delivered and no more will come."""
        return not (self.reading or self.failed or self.messages)

    @property
    def can_be_read_again(self) -> bool:
        """Whether the source has positions that mean something after a crash."""
        return not isinstance(self.source, IterableSource)

    @property
    def rejects(self) -> bool:
        """Whether the next message is rejected."""
        return bool(self.messages) and isinstance(self.messages[0], Rejected)

    @property
    def has_batch(self) -> bool:
        """Whether the next message is a batch."""
        return bool(self.messages) and isinstance(self.messages[0], Message)

    @property
    def is_low(self) -> bool:
        """Whether it is time to read on."""
        return len(self.messages) <= self.low

    def take(self) -> Message | Rejected:
        """Return the next message, and let the thread read on when it is time to."""
        message = self.messages.popleft()
        if self.is_low:
            self.has_space.notify()
        return message

    def stop(self) -> None:
        """Let the thread stop reading, and forget what is queued."""
        self.stopped = True
        self.messages.clear()
        self.has_space.notify()
        self.source.close()

    def put(self, messages: Sequence[Message | Rejected], after: str | None) -> None:
        """Queue messages; the source is read on from the position `after`."""
        with self._changed:
            if self.stopped:
                return
            self.after = after
            if messages:
                was_empty = not self.messages
                self.messages.extend(messages)
                self.awaited_since = None
                self._last_seen[self.name] = time.time()
                if was_empty:  # otherwise nothing changes for the iterating thread
                    self._changed.notify_all()

    def fill(self) -> None:
        """Read the source to its end, in a thread of its own."""
        messages = self.source.read(self.after)
        while self._wait_for_space() and (message := next(messages, _END)) is not _END:
            checked = _checked(message)
            self.put([checked], checked.position)

    def _wait_for_space(self) -> bool:
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
    check_sizes(x, y)
    return Message(message.position, (x, y))


class Readers:
    """Starts the threads that fill queues, and what they share.

    Args:
        capacity: the largest number of queued messages per source.
        on_end: called from the reading thread with the queue of a source that has ended, and its exception or None.

    Attributes:
        lock: guards queues.
        changed: a condition of the same lock; notified of everything that the iterating thread may wait for.
        last_seen: when each source last yielded (`time.time()`).
    """

    def __init__(self, capacity: int, on_end: Callable[[Queue, BaseException | None], object]) -> None:
        self.capacity = capacity
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.last_seen: dict[str, float] = {}
        self.on_end = on_end
        self._hubs: dict[int, _HubThread] = {}

    def start(self, queue: Queue, after: str | None) -> threading.Thread:
        """Read a source after a position, from now on; return the thread, which other sources may share."""
        queue.failed, queue.reading, queue.after = False, True, after
        queue.awaited_since = time.monotonic()
        source = queue.source
        if not isinstance(source, HubSource):
            thread = threading.Thread(target=self._fill, args=(queue,), name=f"source {queue.name}", daemon=True)
            thread.start()
            return thread
        shared = self._hubs.get(id(source.hub))
        if shared is None or not shared.queues:
            shared = self._hubs[id(source.hub)] = _HubThread(source.hub, self)
        shared.add(queue, source)
        return shared.thread

    @property
    def has_received(self) -> bool:
        """Whether there are messages to open."""
        return any(hub.received for hub in self._hubs.values())

    def open_received(self) -> None:
        """Decode and queue what was received from hubs, and report hubs that hang.

        Called by the iterating thread, without the lock: nobody waits for it.
        """
        with self.lock:
            hubs = list(self._hubs.values())
        for hub in hubs:
            hub.open_received()
            hub.report_if_hanging()

    def _fill(self, queue: Queue) -> None:
        try:
            queue.fill()
        except BaseException as error:  # also SystemExit: otherwise a dead source would look like a slow one
            self.on_end(queue, error)
        else:
            self.on_end(queue, None)


class _HubThread:
    """One thread for all sources of a hub: it receives the messages of all tasks by one call.

    Threads that read at the same time would only take the GIL from each other and from the thread that trains. This one
    does not decode: the iterating thread takes less time for it than decoding here would keep it waiting. The thread
    ends when it has no more queues to fill.

    Attributes:
        queues: by queue, the source.
        received: messages that were not opened yet.
    """

    def __init__(self, hub: Hub, readers: Readers) -> None:
        self.queues: dict[Queue, HubSource] = {}
        self.received: dict[Queue, Found] = {}
        self.thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._hub = HubReader(hub)
        self._opening: set[Queue] = set()  # not to be read on before their messages are queued
        self._has_space = threading.Condition(readers.lock)
        self._changed = readers.changed
        self._on_end = readers.on_end
        self._asked_at: float | None = None  # when the present call of the hub began; None between calls

    def add(self, queue: Queue, source: HubSource) -> None:
        """Read one more source; the caller holds the lock."""
        queue.has_space = self._has_space
        queue.low = queue.capacity // 2  # seldom and several, since waking a thread takes longer than a message
        self.queues[queue] = source
        if len(self.queues) == 1 and not self.thread.is_alive():
            self.thread.start()
        self._has_space.notify()

    def open_received(self) -> None:
        """Decode what was received, and queue it."""
        with self._changed:
            received, self.received = self.received, {}
            sources = {queue: self.queues[queue] for queue in received if queue in self.queues and not queue.stopped}
            self._opening |= sources.keys()
        for queue, source in sources.items():
            excerpt = source.open(queue.after, received[queue])
            queue.put(excerpt.messages, excerpt.after)
            if excerpt.ended:
                self._end(queue, None)
        if received:
            with self._has_space:
                self._opening -= sources.keys()
                self._has_space.notify()

    def report_if_hanging(self) -> None:
        """Report a hub that has not answered for long; the thread itself cannot."""
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() > asked_at + HANGING_SECONDS:
            with self._changed:
                sources = list(self.queues.values())
            for source in sources:
                source.report(HubError(f"the hub has not answered for {HANGING_SECONDS:g} s"))

    def _run(self) -> None:
        pause = SHORTEST_PAUSE
        try:
            while self._has_queues():
                with self._has_space:
                    wanted = self._wanted()
                    waits = not self.received and not self._opening and all(queue.is_low for queue in self.queues)
                if wanted and self._read(wanted, WAIT_SECONDS if waits else 0.0):
                    pause = SHORTEST_PAUSE
                else:
                    self._rest(wanted, pause)
                    pause = min(2 * pause, WAIT_SECONDS)
        except BaseException as error:
            for queue in list(self.queues):
                self._end(queue, error)

    def _has_queues(self) -> bool:
        with self._has_space:
            for queue in [queue for queue in self.queues if queue.stopped]:
                del self.queues[queue]
            return bool(self.queues)

    def _wanted(self) -> list[Queue]:
        """Return the queues to read for."""
        wanted = [
            queue
            for queue, source in self.queues.items()
            if queue.is_low and queue not in self.received and queue not in self._opening and not source.is_paused
        ]
        for queue in wanted:
            queue.awaited_since = queue.awaited_since or time.monotonic()
        return wanted

    def _rest(self, known: list[Queue], seconds: float) -> None:
        """Wait until there are other queues to read for than those whose tasks have no messages now."""
        with self._has_space:
            self._has_space.wait_for(
                lambda: any(each.stopped for each in self.queues) or self._wanted() != known, seconds
            )

    def _read(self, wanted: list[Queue], wait: float) -> bool:
        """Receive messages; return whether there were any."""
        sources = {self.queues[queue]: queue for queue in wanted}
        count = (wanted[0].capacity + 1) // 2
        self._asked_at = time.monotonic()
        found = self._hub.read({source: queue.after for source, queue in sources.items()}, count, wait)
        self._asked_at = None
        received = {sources[source]: messages for source, messages in found.items() if messages}
        with self._changed:
            for queue in received:
                queue.awaited_since = None
            self.received |= received
            self._changed.notify_all()
        return bool(received)

    def _end(self, queue: Queue, error: BaseException | None) -> None:
        with self._has_space:
            self.queues.pop(queue, None)
            self.received.pop(queue, None)
        self._on_end(queue, error)
