"""Looking after a hub: which tasks it has, how much of them waits, and what may be deleted."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from spcl.sources import Hub, ResetError

__all__ = ["Watch"]

PERIOD_SECONDS = 0.5
LONGEST_PERIOD_SECONDS = 10.0
SHARE = 0.01  # the largest part of the time that asking takes: of many long streams it would compete with training
CLOSING_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Watch:
    """Asks a hub for its tasks and backlogs, and deletes messages, in a thread of its own: training does not wait.

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
        self._deletable: dict[str, str] = {}
        self._awake = threading.Event()
        self._is_closed = False
        self._is_reachable = True
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Ask once, and then again and again in a thread."""
        self._look()
        self._thread.start()

    def trim(self, task: str, upto: str) -> None:
        """Let the thread delete messages up to a position, at once; what a crash prevents, the next service does."""
        self._deletable[task] = upto
        self._awake.set()

    def backlog(self, task: str, after: str | None) -> int:
        """Return the number of messages after a position; of a stream that was reset, of all messages."""
        try:
            return self._hub.backlog(task, after)
        except ResetError as error:
            self._on_reset(task, error)
            return self._hub.backlog(task, None)

    def close(self) -> None:
        """Stop asking, after what is to be deleted."""
        self._is_closed = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSING_SECONDS)

    def _run(self) -> None:
        seconds = 0.0
        while not self._is_closed:
            self._awake.wait(min(max(PERIOD_SECONDS, seconds / SHARE), LONGEST_PERIOD_SECONDS))
            self._awake.clear()
            begin = time.monotonic()
            self._look()
            seconds = time.monotonic() - begin if self._is_reachable else 0.0  # a timeout says nothing of the next time

    def _look(self) -> None:
        try:
            self._delete()
            self.tasks = self._hub.tasks()
            self.backlogs = {task: self.backlog(task, after) for task, after in self._positions().items()}
        except Exception as error:  # of any broker; it is asked again
            if self._is_reachable:
                _log.warning("the tasks of the source cannot be listed: %s", error)
            self._is_reachable = False
        else:
            self._is_reachable = True

    def _delete(self) -> None:
        while self._deletable:
            task, upto = self._deletable.popitem()
            try:
                self._hub.trim(task, upto)
            except ResetError as error:
                self._on_reset(task, error)
            except BaseException:
                self._deletable.setdefault(task, upto)
                raise
