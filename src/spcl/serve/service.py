"""The service: one learner that trains on the tasks of a hub until it is stopped."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from threading import Lock
from typing import NamedTuple

from spcl._util.registry import Named
from spcl.errors import SpclError
from spcl.learner.prediction import Predictor
from spcl.serve.events import CheckpointEvent, Event, Status, TaskEvent, TaskStatus
from spcl.serve.log import log_task
from spcl.serve.session import Session
from spcl.serve.settings import ServeSettings
from spcl.serve.state import held_state
from spcl.sources import HUBS, Hub, announce, check_task_name
from spcl.tasks import Kind

_log = logging.getLogger(__name__)


class NotRunningError(SpclError):
    """A request to a service that loads its state, or stands by."""


class Snapshot(NamedTuple):
    """A copy of the model, which any number of threads may use, and the number of steps after which it was made."""

    step: int
    model: Predictor


class Service:
    """Trains one learner on the tasks of a hub until it is stopped; after a crash it resumes exactly.

    A checkpoint holds the learner, the position in the stream of every task, and the tasks themselves: a batch is
    learned exactly once, whenever the process is killed. Only when all kept checkpoints hold a batch may the hub delete
    it.

    Args:
        settings: what to learn, from where, and with what.
        on_event: receives events, from several threads.
        predicts: whether to copy the model after loading and after every checkpoint, for predictions.
        standby: wait while another service uses the same state, and then take over.

    Attributes:
        snapshot: the latest copy of the model; None before the first.
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        on_event: Callable[[Event], object] = lambda event: None,
        predicts: bool = False,
        standby: bool = False,
    ) -> None:
        settings.run_settings()
        self.snapshot: Snapshot | None = None
        self._settings = settings
        self._hub: Hub = HUBS.make(settings.source)
        self._listener = on_event
        self._predicts = predicts
        self._standby = standby
        self._has_stood_by = False
        self._stopping = False  # no Event: a signal handler could wait for its lock forever
        self._session: Session | None = None
        self._status: Status | None = None
        self._status_at = 0.0
        self._status_lock = Lock()

    def run(self) -> None:
        """Train in the calling thread until :meth:`stop`; load the checkpoint first, if there is one, save at the end.

        Raises:
            StateInUseError: if another service uses the state, unless this one is a standby.
        """
        state = self._settings.state
        wait = partial(self.stand_by, f"another service uses the state {state}") if self._standby else None
        with held_state(state, wait) as held, closing(self._hub):
            if not held:
                return
            if self._has_stood_by:
                _log.info("takes over the state %s", state)
            session = self._session = Session(self._settings, self._hub, self._on_event, lambda: self._stopping)
            gc.freeze()  # what exists now stays: to search it for garbage again and again takes 0.3 s each time
            try:
                self._take_snapshot()
                session.run()
            finally:
                session.close()
                gc.unfreeze()

    def stand_by(self, reason: str) -> bool:
        """Log, once, that this service waits for another one; return whether to wait longer."""
        if not self._has_stood_by:
            _log.info("stands by, as %s", reason)
            self._has_stood_by = True
        return not self._stopping

    def stop(self) -> None:
        """Let :meth:`run` save and return; may be called from any thread and from signal handlers."""
        self._stopping = True

    def start_task(
        self,
        name: str,
        *,
        classes: int | Sequence[str] | None = None,
        kind: Kind = "classification",
        task: str | None = None,
        encoder: Named | None = None,
    ) -> None:
        """Start a source between two moments, as if it had been announced in its stream; survives a restart.

        Args:
            name: its name.
            classes: the number or names of classes, labels or, of a regression, outputs.
            kind: what its targets are.
            task: the name of its task, which other sources may answer, too; by default one of its own name.
            encoder: the name of its encoder, or its name and options; by default as the settings say.

        Raises:
            TaskStateError: if it was started already.
            StorageError: if the request cannot be kept.
            NotRunningError: before the state is loaded.
        """
        self._running().request_start(announce(check_task_name(name), kind, classes, task, encoder))

    def finish_task(self, name: str) -> TaskStatus:
        """End a source between two moments: from then on it is only replayed; survives a restart.

        Return the state of the source, which waits for its end.

        Raises:
            UnknownTaskError: if there is no such source.
            TaskStateError: if it was finished already, or is about to be.
            StorageError: if the request cannot be kept.
            NotRunningError: before the state is loaded.
        """
        return self._running().request_finish(name)

    def has_task(self, name: str) -> bool:
        """Return whether there is or was a task."""
        return self._running().has_task(name)

    def has_source(self, name: str) -> bool:
        """Return whether there is or was a source."""
        return self._running().has_source(name)

    def faults(self, hub_seconds: float | None = None) -> tuple[str, ...]:
        """Return what keeps the service from its work now; cheap, from any thread.

        Args:
            hub_seconds: for how long the hub need not answer; ``ready_seconds`` by default, as for all else.
        """
        if self._session is None:
            return ("the service loads its state, or stands by",)
        return self._session.faults(hub_seconds)

    def status(self, max_age: float = 0.0) -> Status:
        """Return the state of the service and of its tasks; may be called from any thread.

        Args:
            max_age: the age in seconds up to which the last answer is returned again, whoever asked for it: to look at
                many tasks takes milliseconds, which training lacks.
        """
        if self._session is None:
            return Status([], 0, 0, 0, 0, None, None, 0.0, running=False, faults=self.faults())
        with self._status_lock:
            if self._status is None or time.monotonic() > self._status_at + max_age:
                self._status, self._status_at = self._session.status(), time.monotonic()
            return self._status

    def _running(self) -> Session:
        if self._session is None:
            raise NotRunningError("the service has not loaded its state yet; ask again when it runs")
        return self._session

    def _on_event(self, event: Event) -> None:
        if isinstance(event, CheckpointEvent):
            self._take_snapshot()
        elif isinstance(event, TaskEvent):
            log_task(event)
        self._listener(event)

    def _take_snapshot(self) -> None:
        if self._predicts and self._session is not None:
            learner = self._session.learner
            self.snapshot = Snapshot(learner.steps, learner.snapshot())
