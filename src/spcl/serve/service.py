"""The service: one learner that trains on the tasks of a hub until it is stopped."""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from threading import Lock

from spcl.errors import SpclError, TaskError
from spcl.learner import Learner
from spcl.serve.events import CheckpointEvent, Event
from spcl.serve.lock import held_state
from spcl.serve.records import TaskRecord
from spcl.serve.session import Session, StoppedError
from spcl.serve.settings import ServeSettings
from spcl.serve.status import Status, TaskState, TaskStatus
from spcl.sources import HUBS, Hub, Kind, Schema, check_task_name

__all__ = ["Service", "Status", "TaskExistsError", "TaskStatus"]


class TaskExistsError(TaskError):
    """A task that was started already, or is about to be."""


class Service:
    """Trains one learner on the tasks of a hub until it is stopped, and goes on exactly after a crash.

    A checkpoint holds the learner, the position in the stream of every task, and the tasks themselves: a batch is
    learned exactly once, whenever the process is killed. Only when two checkpoints hold a batch may the hub delete it.

    Args:
        settings: what to learn, from where, and with what.
        on_event: receives events, from several threads.
        make_predictor: called with the learner after loading and after every checkpoint, in the thread of :meth:`run`.
        standby: wait while another service uses the same state, and then take over.

    Attributes:
        predictor: what ``make_predictor`` returned last; None before.
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        on_event: Callable[[Event], object] = lambda event: None,
        make_predictor: Callable[[Learner], object] | None = None,
        standby: bool = False,
    ) -> None:
        settings.run_settings()
        self.predictor: object | None = None
        self._settings = settings
        self._hub: Hub = HUBS.make(settings.source)
        self._listener = on_event
        self._make_predictor = make_predictor
        self._standby = standby
        self._stopping = False  # no Event: a signal handler could wait for its lock forever
        self._session: Session | None = None
        self._began = 0.0
        self._lock = Lock()  # between a check of a request and its record

    def run(self) -> None:
        """Train in the calling thread until :meth:`stop`; load the checkpoint first, if there is one, save at the end.

        Raises:
            StateInUseError: if another service uses the state, unless this one is a standby.
        """
        wait = (lambda: not self._stopping) if self._standby else None
        with held_state(self._settings.state, wait) as held, closing(self._hub):
            if not held:
                return
            self._began = time.monotonic()
            session = self._session = Session(self._settings, self._hub, self._on_event, lambda: self._stopping)
            gc.freeze()  # what exists now stays: to search it for garbage again and again takes 0.3 s each time
            try:
                self._swap_predictor()
                while not self._stopping:
                    session.advance()
                session.save()
            except StoppedError:
                pass  # the last checkpoint is from before that message
            finally:
                session.close()
                gc.unfreeze()

    def stop(self) -> None:
        """Let :meth:`run` save and return; may be called from any thread and from signal handlers."""
        self._stopping = True

    def start_task(
        self, name: str, *, classes: int | Sequence[str] | None = None, kind: Kind = "classification"
    ) -> None:
        """Start a task between two moments, as if it had been announced in its stream; survives a restart.

        Args:
            name: its name.
            classes: the number or names of classes, labels or, of a regression, outputs.
            kind: what its targets are.

        Raises:
            TaskExistsError: if it was started already.
        """
        check_task_name(name)
        schema = Schema.of(kind, classes)
        with self._lock:
            session = self._running()
            if session.is_starting(name):
                raise TaskExistsError(f"there is a request to start task {name!r} already; choose another name")
            source, record = session.sources.get(name), session.records.tasks.get(name)
            if record is not None and (source is None or source.schema is not None):
                state = "is finished" if record.finished else "is running"
                raise TaskExistsError(f"there is a task {name!r} already, which {state}; choose another name")
            self._request(session, {"do": "start", "task": name, "schema": schema.model_dump(mode="json")})

    def finish_task(self, name: str) -> None:
        """End a task between two moments, from when on it is only replayed; survives a restart."""
        with self._lock:
            session = self._running()
            record = session.records.tasks.get(name)
            if record is None or record.finished:
                known = [each.name for each in list(session.records.tasks.values()) if not each.finished]
                raise TaskError(f"there is no running task {name!r}; there are {known}")
            self._request(session, {"do": "finish", "task": name})

    def status(self) -> Status:
        """Return the state of the service and of its tasks; cheap, from any thread."""
        session = self._session
        if session is None:
            return Status([], 0, 0, 0, 0, None, None, 0.0, running=False)
        records = list(session.records.tasks.values())
        silences, lags = session.silences(), session.stream.lag
        saved = session.saved_at
        return Status(
            tasks=[self._task_status(session, each, silences.get(each.name, 0.0), lags) for each in records],
            steps=session.learner.steps,
            samples=sum(each.samples for each in records),
            memory_samples=session.memory_size[0],
            memory_bytes=session.memory_size[1],
            checkpoint_time=saved,
            checkpoint_age=None if saved is None else max(0.0, time.time() - saved),
            uptime=time.monotonic() - self._began,
            running=True,
        )

    def _task_status(self, session: Session, record: TaskRecord, silence: float, lags: dict[str, float]) -> TaskStatus:
        source = session.sources.get(record.name)
        schema = record.schema if source is None else source.schema
        state: TaskState = "running"
        if record.finished:
            state = "finished"
        elif (source is not None and source.is_out) or record.name in session.stream.failed:
            state = "failed"
        elif schema is None:
            state = "waiting"
        elif silence > self._settings.tasks.silence_seconds:
            state = "silent"
        return TaskStatus(
            name=record.name,
            kind=None if schema is None else schema.kind,
            classes=None if schema is None else schema.outputs,
            state=state,
            batches=record.batches,
            samples=record.samples,
            lag_seconds=lags.get(record.name, 0.0),
            backlog=session.watch.backlogs.get(record.name, 0),
            last_seen=session.stream.last_seen.get(record.name),
            dead_letters=record.dead_letters,
            late=record.late,
        )

    def _running(self) -> Session:
        if self._session is None:
            raise SpclError("the service has not loaded its state yet; ask again when it runs")
        return self._session

    def _request(self, session: Session, request: dict[str, object]) -> None:
        session.requests.add(request)
        session.request()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, CheckpointEvent):
            self._swap_predictor()
        self._listener(event)

    def _swap_predictor(self) -> None:
        if self._make_predictor is not None and self._session is not None:
            self.predictor = self._make_predictor(self._session.learner)
