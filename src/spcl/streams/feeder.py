"""The threads that read sources into their queues: one for all sources of a hub, and one for every other source."""

import threading
import time
from collections.abc import Callable

from spcl.sources import Found, Hub, HubReader, HubSource
from spcl.sources.hub_source import WAIT_SECONDS
from spcl.streams.reader import Queues, Reader

__all__ = ["Feeder"]

OnEnd = Callable[[Reader, BaseException | None], object]

SHORTEST_PAUSE = 0.002


class Feeder:
    """Starts threads that read sources into their queues.

    Args:
        queues: what readers share.
        on_end: called from the reading thread with a reader whose source has ended, and its exception or None.
    """

    def __init__(self, queues: Queues, on_end: OnEnd) -> None:
        self._queues = queues
        self._on_end = on_end
        self._hubs: dict[int, _HubThread] = {}

    def start(self, reader: Reader, after: str | None) -> threading.Thread:
        """Read a source after a position, from now on; return the thread, which may be that of other sources, too."""
        reader.start(after)
        source = reader.source
        if not isinstance(source, HubSource):
            thread = threading.Thread(target=self._run, args=(reader,), name=f"source {reader.name}", daemon=True)
            thread.start()
            return thread
        shared = self._hubs.get(id(source.hub))
        if shared is None or not shared.readers:
            shared = self._hubs[id(source.hub)] = _HubThread(source.hub, self._queues, self._on_end)
        shared.add(reader, source)
        return shared.thread

    def deliver(self) -> None:
        """Queue what the threads of hubs have received; called by the iterating thread, with the lock."""
        for hub in self._hubs.values():
            hub.deliver()

    def _run(self, reader: Reader) -> None:
        try:
            reader.read()
        except BaseException as error:  # also SystemExit: otherwise a dead source would look like a slow one
            self._on_end(reader, error)
        else:
            self._on_end(reader, None)


class _HubThread:
    """One thread for all sources of a hub, by few calls for many messages: threads that read at the same time would
    only take Python's lock from each other, and from the thread that trains.

    It only receives messages. The iterating thread decodes them: there that takes as long as it takes, while here it
    would hold up training for twice as long. The thread ends when it has no more readers.
    """

    def __init__(self, hub: Hub, queues: Queues, on_end: OnEnd) -> None:
        self.readers: dict[Reader, HubSource] = {}
        self.thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._hub = HubReader(hub)
        self._received: dict[Reader, Found] = {}  # not queued yet
        self._has_space = threading.Condition(queues.lock)
        self._changed = queues.changed
        self._on_end = on_end

    def add(self, reader: Reader, source: HubSource) -> None:
        """Read one more source; the caller holds the lock."""
        reader.has_space = self._has_space
        reader.low = reader.capacity // 2  # seldom and several, since waking a thread takes longer than a message
        self.readers[reader] = source
        if len(self.readers) == 1 and not self.thread.is_alive():
            self.thread.start()
        self._has_space.notify()

    def deliver(self) -> None:
        """Decode and queue what was received; the caller holds the lock."""
        received, self._received = self._received, {}
        for reader, found in received.items():
            if reader.stopped:
                continue
            excerpt = self.readers[reader].open(reader.after, found)
            reader.put(excerpt.messages, excerpt.after)
            if excerpt.ended:
                self._end(reader, None)
        if received:
            self._has_space.notify()

    def _run(self) -> None:
        pause = SHORTEST_PAUSE
        try:
            while self._has_readers():
                with self._has_space:
                    wanted = self._wanted()
                    waits = not self._received and all(reader.is_low for reader in self.readers)
                if wanted and self._read(wanted, WAIT_SECONDS if waits else 0.0):
                    pause = SHORTEST_PAUSE
                else:
                    self._rest(wanted, pause)
                    pause = min(2 * pause, WAIT_SECONDS)
        except BaseException as error:
            for reader in list(self.readers):
                self._end(reader, error)

    def _has_readers(self) -> bool:
        with self._has_space:
            for reader in [reader for reader in self.readers if reader.stopped]:
                del self.readers[reader]
            return bool(self.readers)

    def _wanted(self) -> list[Reader]:
        """Return the readers to read for."""
        wanted = [
            reader
            for reader, source in self.readers.items()
            if reader.is_low and reader not in self._received and not source.is_paused
        ]
        for reader in wanted:
            reader.awaited_since = reader.awaited_since or time.monotonic()
        return wanted

    def _rest(self, known: list[Reader], seconds: float) -> None:
        """Wait until there are others to read for than those that have no messages now."""
        with self._has_space:
            self._has_space.wait_for(
                lambda: any(each.stopped for each in self.readers) or self._wanted() != known, seconds
            )

    def _read(self, wanted: list[Reader], wait: float) -> bool:
        """Receive messages; return whether there were any."""
        sources = {self.readers[reader]: reader for reader in wanted}
        count = (wanted[0].capacity + 1) // 2
        found = self._hub.read({source: reader.after for source, reader in sources.items()}, count, wait)
        received = {sources[source]: messages for source, messages in found.items() if messages}
        with self._changed:
            for reader in received:
                reader.awaited_since = None
            self._received |= received
            self._changed.notify_all()
        return bool(received)

    def _end(self, reader: Reader, error: BaseException | None) -> None:
        with self._has_space:
            self.readers.pop(reader, None)
            self._received.pop(reader, None)
        self._on_end(reader, error)
