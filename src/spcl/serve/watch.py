"""What has to wait for a hub, in a thread of its own: training never does."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from spcl.errors import DataError
from spcl.sources import Data, Entry, Hub, Rejected, ResetError, decode
from spcl.sources.reader import READ_AHEAD
from spcl.sources.wire import MAX_BYTES

PERIOD_SECONDS = 0.5
LONGEST_PERIOD_SECONDS = 10.0
SHARE = 0.01  # the largest part of the time that asking takes: of many long streams it would compete with training
RETRY_SECONDS = 0.2
AWAY = (ConnectionError, TimeoutError)  # the hub cannot be reached now; another error is of one task or message
LOG_SECONDS = 60.0  # between two reports of the same failure
CLOSING_SECONDS = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PutAway:
    """A message that is in the dead letters now, or why it cannot be kept there."""

    task: str
    rejected: Rejected
    error: Exception | None


@dataclass(frozen=True)
class Ended:
    """A source whose stream was deleted, and how many of its messages were not learned."""

    task: str
    late: int


@dataclass(frozen=True)
class Returned:
    """A source that is announced again after its end.

    Attributes:
        task: its name.
        after: the position before the announcement.
        late: how many messages before the announcement were not learned.
    """

    task: str
    after: str
    late: int


class Looked(NamedTuple):
    """How far the stream of a source that has ended was looked at, and how many messages there are late."""

    position: str
    late: int


def _is_start(data: Data | DataError, source: str) -> bool:
    try:
        return not isinstance(data, DataError) and decode(data, source=source).content == "start"
    except DataError:
        return False


class Watch:
    """Asks a hub for its tasks and backlogs, deletes messages, and puts away messages that cannot be learned.

    Every call of the hub is made by the thread of the watch. What fails is tried again until the watch is closed; what
    is not done by then is done by the next service.

    Args:
        hub: the hub.
        positions: returns how far each task is learned; None where nothing is.
        on_reset: called as ``on_reset(task, error)`` with a stream that was reset, every time that it is looked at.

    Attributes:
        tasks: the tasks of the hub; a new list with every answer.
        backlogs: the messages that wait, by task.
    """

    def __init__(
        self,
        hub: Hub,
        positions: Callable[[], Mapping[str, str | None]],
        on_reset: Callable[[str, ResetError], object],
    ) -> None:
        self.tasks: list[str] = []
        self.backlogs: dict[str, int] = {}
        self._hub = hub
        self._positions = positions
        self._on_reset = on_reset
        self._letters: deque[tuple[str, Rejected]] = deque()
        self._deletable: dict[str, str] = {}
        self._endable: dict[str, str | None] = {}
        self._returning: dict[str, Looked] = {}  # how far sources that may return were looked at, and late messages
        self._returned: set[str] = set()  # sources whose return the service may not have noticed
        self._done: SimpleQueue[PutAway | Ended | Returned] = SimpleQueue()
        self._awake = threading.Event()
        self._is_closed = False
        self._warned: set[str] = set()  # tasks whose messages cannot be deleted
        self._logged: dict[str, float] = {}
        self._failing_since: float | None = None
        self._asked_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Ask from now on."""
        self._thread.start()

    def trim(self, task: str, upto: str) -> None:
        """Delete messages up to a position."""
        self._deletable[task] = upto
        self._awake.set()

    def end(self, task: str, position: str | None) -> None:
        """Count the messages of a task after a position, and delete its stream: :meth:`take` then has it."""
        self._endable[task] = position
        self._awake.set()

    def await_return(self, task: str, position: str) -> None:
        """Look for a new announcement of a source that has ended, after a position: :meth:`take` then has it."""
        self._endable.pop(task, None)  # of an earlier life
        self._returned.discard(task)
        self._returning[task] = Looked(position, 0)
        self._awake.set()

    def put_away(self, task: str, rejected: Rejected) -> None:
        """Add a message to the dead letters: :meth:`take` then has it."""
        self._letters.append((task, rejected))
        self._awake.set()

    def take(self, wait: float = 0.0) -> PutAway | Ended | Returned | None:
        """Return the next thing that was done; None if nothing was done within ``wait`` seconds."""
        try:
            return self._done.get(timeout=wait) if wait else self._done.get_nowait()
        except Empty:
            return None

    @property
    def away_seconds(self) -> float:
        """For how long the hub has not answered; 0 while it does."""
        since = [each for each in (self._failing_since, self._asked_at) if each is not None]
        return time.monotonic() - min(since) if since else 0.0

    def close(self) -> None:
        """Stop asking, after what is to be deleted; wait no longer than a second for the hub."""
        self._is_closed = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSING_SECONDS)

    def _run(self) -> None:
        look_at = 0.0
        while not self._is_closed:
            self._asked_at = time.monotonic()
            answers = self._put_all_away() and self._delete_all()
            if (begin := time.monotonic()) >= look_at or not answers:
                answers = self._look()
                seconds = time.monotonic() - begin if answers else 0.0  # a timeout says nothing of the next time
                look_at = time.monotonic() + min(max(PERIOD_SECONDS, seconds / SHARE), LONGEST_PERIOD_SECONDS)
            self._asked_at = None
            self._awake.wait(max(0.0, look_at - time.monotonic()) if answers else RETRY_SECONDS)
            self._awake.clear()
        if self._put_all_away():
            self._delete_all()

    def _put_all_away(self) -> bool:
        """Put messages away in their order; return whether the hub answered."""
        while self._letters:
            task, rejected = self._letters[0]
            error: Exception | None = None
            try:
                self._hub.dead_letter(task, rejected.position, rejected.data, rejected.reason)
            except AWAY as away:
                self._note(away)
                return False
            except Exception as refused:  # such as a full disk; hubs of others raise anything
                error = refused
            self._note(None)
            self._letters.popleft()
            self._done.put(PutAway(task, rejected, error))
        return True

    def _delete_all(self) -> bool:
        """Delete messages and streams, what cannot be deleted later again; return whether the hub answered."""
        for task, upto in list(self._deletable.items()):
            if self._succeeds(partial(self._trim, task, upto), task) and self._deletable[task] == upto:
                del self._deletable[task]
        for task, position in list(self._endable.items()):
            is_present = self._endable.get(task, "") == position  # else the source has returned meanwhile
            if is_present and self._succeeds(partial(self._end, task, position), task):
                self._endable.pop(task, None)
        return self._failing_since is None

    def _succeeds(self, delete: Callable[[], bool], task: str) -> bool:
        """Try to delete; return whether there is nothing more to delete."""
        if self._failing_since is not None:
            return False  # to ask for every task would take as many timeouts
        try:
            is_done = delete()
        except AWAY as away:
            self._note(away)
        except Exception as refused:  # of any broker, for this task alone
            if task not in self._warned:
                _log.warning("what is learned of task %r cannot be deleted, and is tried again: %s", task, refused)
            self._warned.add(task)
        else:
            self._warned.discard(task)
            return is_done
        return False

    def _look(self) -> bool:
        """List tasks and backlogs; return whether the hub answered."""
        try:
            self.tasks = self._hub.tasks()
            for task in [task for task in self.tasks if task in self._returning]:
                self._find_return(task)
            self.backlogs = {task: self._backlog(task, after) for task, after in self._positions().items()}
        except Exception as error:  # of any broker; it is asked again
            self._note(error)
            return False
        self._note(None)
        return True

    def _trim(self, task: str, upto: str) -> bool:
        try:
            self._hub.trim(task, upto)
        except ResetError as error:
            self._on_reset(task, error)
        return True

    def _end(self, task: str, position: str | None) -> bool:
        """Delete the stream of a source, unless it returns; return whether there is nothing more to do."""
        if task in self._returned or self._find_return(task):
            return True
        looked = self._returning.get(task)
        if looked is None:
            late = 0 if position is None else self._backlog(task, position)
            self._hub.end(task)
        elif not self._hub.end(task, looked.position):
            return False
        else:
            late, self._returning[task] = looked.late, Looked(looked.position, 0)
        self._done.put(Ended(task, late))
        return True

    def _find_return(self, task: str) -> bool:
        """Look for a new announcement of a source; return whether it is announced."""
        if task not in self._returning:
            return False
        position, late = self._returning[task]
        while found := self._read(task, position):
            for place, data in found:
                if _is_start(data, task):
                    self._returned.add(task)
                    del self._returning[task]
                    self._done.put(Returned(task, position, late))
                    return True
                position, late = place, late + 1
            self._returning[task] = Looked(position, late)
        return False

    def _read(self, task: str, after: str) -> Sequence[Entry]:
        """Return the next messages of a source; none of a stream that was reset, in which the source cannot return."""
        try:
            return self._hub.read({task: after}, READ_AHEAD, 0.0, MAX_BYTES).get(task, ())
        except ResetError:
            del self._returning[task]
            return ()

    def _backlog(self, task: str, after: str | None) -> int:
        """Return the number of messages after a position; of a stream that was reset, of all messages."""
        try:
            return self._hub.backlog(task, after)
        except ResetError as error:
            self._on_reset(task, error)
            return self._hub.backlog(task, None)

    def _note(self, error: Exception | None) -> None:
        """Note whether the hub answers; log a failure once a minute."""
        if error is None:
            if self._failing_since is not None:
                _log.info("the hub of the sources answers again")
            self._failing_since = None
            return
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now > self._logged.get(str(error), -LOG_SECONDS) + LOG_SECONDS:
            self._logged = {str(error): now}
            _log.warning("the hub of the sources does not answer, and is asked again: %s", error)
