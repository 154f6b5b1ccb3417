"""A service at work: the thread that trains, from requests and messages to the learner and its checkpoints."""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, Literal

import torch

from spcl.batches import Batch
from spcl.checkpoint import has_checkpoint
from spcl.encoders import ENCODERS
from spcl.errors import DataError, SpclError, TaskError, is_out_of_memory
from spcl.learner import Learner, StepReport
from spcl.runs import RunSettings
from spcl.runs.build import add_task
from spcl.serve.events import (
    CheckpointEvent,
    DeadLetterEvent,
    Event,
    SaveFailedEvent,
    Status,
    StepEvent,
    TaskEvent,
    TaskState,
    TaskStatus,
)
from spcl.serve.settings import ServeSettings, SourceSettings
from spcl.serve.state import (
    CHECKPOINT,
    Checkpoints,
    Held,
    Records,
    Requests,
    TaskRecord,
    TaskRequest,
    load_learner,
    new_learner,
)
from spcl.serve.watch import Ended, PutAway, Returned, Watch
from spcl.sources import (
    Announcement,
    Data,
    Hub,
    HubSource,
    Rejected,
    ResetError,
    check_task_name,
    encode_batch,
)
from spcl.sources.wire import describe_task
from spcl.streams import Failure, LiveStream, Moment
from spcl.tasks import TaskDescription

CAPACITY = 8  # batches of a task that are read ahead
IDLE_SECONDS = 0.1
TICK_SECONDS = 1.0
POLL_SECONDS = 0.05
CLOSING_SECONDS = 2.0
END_REQUESTED = "its end between two steps, as requested"
MOST_REFUSED = 20  # names of tasks that are reported
MOST_LETTERS, MOST_LETTER_BYTES = 64, 64 * 2**20  # messages that cannot be learned and are not put away yet

MEASURING_SHARE = 0.01
"""The largest part of the time that tests of batches before training, and κ, take."""

_log = logging.getLogger(__name__)


class TaskStateError(TaskError):
    """A request that does not fit the state of a task: it was started or finished already, or is about to be."""


class UnknownTaskError(TaskError):
    """A request about a task that does not exist."""


class StorageError(SpclError):
    """A request that cannot be kept, so that it would be lost: such as on a full disk."""


class Session:
    """All that exists while a service holds its state.

    One thread trains: it makes the session and calls :meth:`run`. It alone changes learner, records and sources, and
    never waits for the hub: the threads of the stream and of the watch do. Requests, status and faults may be asked for
    by any thread.

    Args:
        settings: of the service.
        hub: where the tasks are.
        on_event: receives events, from several threads.
        is_stopping: whether the service is to end.

    Attributes:
        learner: the learner.
    """

    def __init__(
        self,
        settings: ServeSettings,
        hub: Hub,
        on_event: Callable[[Event], object],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._hub = hub
        self._on_event = on_event
        self._is_stopping = is_stopping
        self._path = settings.state / CHECKPOINT
        self._began = self._beat_at = time.monotonic()
        self._records = Records()
        self._checkpoints = Checkpoints(settings.keep_checkpoints, settings.checkpoint_seconds)
        self._stream = LiveStream(
            capacity=CAPACITY,
            patience=IDLE_SECONDS,
            keep_open=True,
            together=settings.together,
            on_failure=self._report_failure,
            on_rejected=self._reject,
        )
        self._encoder = settings.run_settings().encoder  # of sources that do not say theirs
        self._watch = Watch(hub, self._positions, self._lose)
        self._sources: dict[str, HubSource] = {}
        self._alive_since: dict[str, float] = {}  # when each source was added, or could be reached again
        self._refused_names: dict[str, str] = {}  # and why
        self._requests = Requests(settings.state)
        self._requested: set[tuple[str, str]] = set()  # (request, task); requests to finish stay
        self._requesting = Lock()  # between the check of a request and its record
        self._look_for_requests: Literal["now", "later", "no"] = "now"
        self._letters = self._letter_bytes = 0  # messages that are being put away
        self._warned: set[str] = set()  # tasks whose first refused message is logged
        self._lost: set[str] = set()  # tasks whose first message that could not be kept is logged
        self._trims: dict[str, str] = {}
        self._ended_in_hub: set[str] = set()
        self._cut: set[str] = set()  # sources that were ended, and have not ended themselves
        self._memory_size = (0, 0)
        self._tick_at = 0.0
        self._load()

    def _load(self) -> None:
        run_settings = self._settings.run_settings()
        if run_settings.threads is not None:
            torch.set_num_threads(run_settings.threads)
        if has_checkpoint(self._path):
            self.learner, changes = load_learner(self._path, self._settings, self._records, self._stream)
            running = sum(not each.finished for each in self._records.tasks.values())
            _log.info(
                "continues after step %d with %d tasks, %d running",
                self.learner.steps,
                len(self._records.tasks),
                running,
            )
            self._checkpoints.load(self._held(), self._path.stat().st_mtime if self._path.exists() else None)
            for change in changes:
                self._checkpoints.change(at_once=True)
                self._on_event(TaskEvent(time.time(), "", "changed", change))
        else:
            self.learner = new_learner(run_settings, self._settings.inputs, self._records)
            _log.info("begins with a new learner, as there is no checkpoint in %s", self._settings.state)
        self._trainer = Trainer(self.learner, run_settings, self._records, self._on_event, self._reject_batch)
        with suppress(OSError):
            for _, data in self._requests.after(self._records.request):
                with suppress(SpclError):
                    self._requested.add(TaskRequest.parsed(data).key)
        for record in self._records.tasks.values():
            if not record.finished:
                self._add_source(record)
            else:
                self._await_return(record)
        self._watch.start()

    # -- what the thread that trains does

    def run(self) -> None:
        """Learn until the service is to stop, and save."""
        self._trainer.train(self._moments())
        self._finish()

    def _moments(self) -> Iterator[Moment]:
        """Yield what is to be learned; between two moments carry out requests, add and end tasks, and save."""
        while not self._is_stopping():
            self._beat_at = time.monotonic()
            if self._look_for_requests == "now":
                self._carry_out_requests()
            self._add_found_tasks()
            if time.monotonic() >= self._tick_at:
                self._tick()
            moment = next(iter(self._stream), None)  # None after a tenth of a second without any
            if moment is not None:
                self._learn_schemas()
                yield moment
                self._checkpoints.change()
            self._record_ends()
            self._take_all_done()
            if self._checkpoints.is_due() and not self._letters:
                self._try_to_save()

    def _finish(self) -> None:
        """Save what was learned, and stop reading; wait only briefly for a hub."""
        deadline = time.monotonic() + CLOSING_SECONDS
        while self._letters and time.monotonic() < deadline:
            self._take_done(POLL_SECONDS)
        if self._letters:
            _log.warning(
                "nothing is saved, as %d messages could not be put away in the hub; the next start reads them again",
                self._letters,
            )
            return
        self._save()
        _log.info("saved after step %d, and stops", self.learner.steps)
        self.close()
        if self._take_all_done():
            self._write()

    def close(self) -> None:
        """Stop reading."""
        self._watch.close()
        self._stream.close()

    def _tick(self) -> None:
        self._tick_at = time.monotonic() + TICK_SECONDS
        if self._look_for_requests == "later":
            self._look_for_requests = "now"
        if self.learner.memory is not None:
            self._memory_size = len(self.learner.memory), self.learner.memory.nbytes
        if self._settings.tasks.end == "silence":
            queued = self._stream.queued
            for name, seconds in self._silences().items():
                if seconds > self._settings.tasks.silence_seconds and not queued.get(name):
                    self._cut.add(name)
                    self._stream.remove(name)

    # -- tasks

    def _add_found_tasks(self) -> None:
        for name in self._watch.tasks:
            if name in self._records.tasks or name in self._refused_names:
                continue
            try:
                self._add_source(self._new_record(check_task_name(name)))
            except SpclError as error:
                self._refused_names[name] = str(error)
                if len(self._refused_names) <= MOST_REFUSED:
                    self._on_event(TaskEvent(time.time(), name, "failed", str(error)))

    def _new_record(self, name: str) -> TaskRecord:
        """Return the record of a source that is new, with what the settings say of it."""
        known = self._settings.sources.get(name, SourceSettings())
        return TaskRecord(name, task=known.task or name, encoder=known.encoder or self._encoder)

    def _add_source(self, record: TaskRecord) -> None:
        """Read a source from now on; note it, if it is new."""
        self._read(record, self._stream.add)
        self._records.tasks[record.name] = record

    def _read(self, record: TaskRecord, read: Callable[[str, HubSource], object]) -> None:
        tasks = self._settings.tasks
        sight: TaskDescription | Literal["infer"] = "infer"
        if tasks.classes is not None:
            sight = describe_task(record.name, tasks.kind, tasks.classes)
        source = HubSource(
            self._hub,
            record.name,
            self._settings.inputs.description(),
            description=record.schema,
            answers=record.task,
            encoder=record.encoder,
            check=self._check_announced,
            first_sight=sight if tasks.start == "first-sight" else None,
            max_bytes=self._settings.max_bytes,
            trim=self._trims.__setitem__,
            on_outage=self._report_outage,
        )
        self._sources[record.name] = source
        self._alive_since[record.name] = time.monotonic()
        read(record.name, source)

    def _check_announced(self, announced: Announcement) -> None:
        """Raise an error unless a source agrees with the others of its task, and there is such an encoder."""
        if announced.encoder is not None:
            ENCODERS.check(announced.encoder)
        for other in self._sources.values():
            if (known := other.description) is not None and known.name == announced.task.name:
                break
        else:
            known = self._records.described.get(announced.task.name)
        if known not in (None, announced.task):
            raise TaskError(
                f"source {announced.source!r} is announced as {announced}, but task {announced.task.name!r} has "
                f"{known} from others; announce the same, or another task"
            )

    def _learn_schemas(self) -> None:
        for name, source in self._sources.items():
            if self._records.tasks[name].schema is None:
                self._records.tasks[name].settle(source.description, source.encoder)

    def _record_ends(self) -> None:
        for name in self._stream.ended:
            record = self._records.tasks[name]
            if not record.finished:
                record.finished, record.may_return = True, name not in self._cut
                self._cut.discard(name)
                self._await_return(record)
                self._sources.pop(name).close()
                self._checkpoints.change()
                self._on_event(TaskEvent(time.time(), name, "ended", f"after {record.batches} batches"))

    def _await_return(self, record: TaskRecord) -> None:
        position = self._stream.ends.get(record.name)
        if record.may_return and position is not None:
            self._watch.await_return(record.name, position)

    def _return(self, done: Returned) -> None:
        """Read a source again that had ended."""
        record = self._records.tasks[done.task]
        record.finished, record.late = False, record.late + done.late
        self._ended_in_hub.discard(record.name)
        self._read(record, partial(self._stream.restart, after=done.after))
        self._checkpoints.change(at_once=True)
        self._on_event(TaskEvent(time.time(), record.name, "started", f"again, after {record.batches} batches"))

    def _positions(self) -> dict[str, str | None]:
        """Return how far each task that has not finished is learned; the watch asks for it."""
        known = self._stream.positions
        return {name: known.get(name) for name, record in list(self._records.tasks.items()) if not record.finished}

    def _silences(self) -> dict[str, float]:
        """Return for how long each task that is known has had no message, up to the last time when its hub said so."""
        now, lags = time.monotonic(), self._stream.lag
        return {
            name: source.quiet_at - max(now - lags[name], self._alive_since[name])
            for name, source in list(self._sources.items())
            if name in lags and source.description is not None
        }

    # -- requests

    def request_start(self, announced: Announcement) -> None:
        """Keep a request to start a source."""
        with self._requesting:
            name = announced.source
            source, record = self._sources.get(name), self._records.tasks.get(name)
            if record is None and ("start", name) in self._requested:
                raise TaskStateError(f"there is a request to start task {name!r} already; choose another name")
            if record is not None and (source is None or source.description is not None):
                state = "is finished" if record.finished else "is running"
                raise TaskStateError(f"there is a task {name!r} already, which {state}; choose another name")
            self._keep_request(TaskRequest("start", name, announced))

    def request_finish(self, name: str) -> TaskStatus:
        """Keep a request to finish a task; return the state of the task, which waits for its end."""
        with self._requesting:
            record = self._records.tasks.get(name)
            if record is None:
                running = [each.name for each in list(self._records.tasks.values()) if not each.finished]
                raise UnknownTaskError(f"there is no task {name!r}; the running tasks are {running}")
            if record.finished or ("finish", name) in self._requested:
                raise TaskStateError(f"task {name!r} is finished already, or about to be")
            (status,) = self._task_statuses([record])
            self._keep_request(TaskRequest("finish", name))
            return replace(status, waits_for=END_REQUESTED)

    def _keep_request(self, request: TaskRequest) -> None:
        try:
            self._requests.add(request)
        except OSError as error:
            raise StorageError(
                f"the request to {request.do} task {request.task!r} cannot be stored in the state: "
                f"{error.strerror or error}; nothing was changed: try again when it can be"
            ) from error
        self._requested.add(request.key)
        self._look_for_requests = "now"

    def _carry_out_requests(self) -> None:
        """Start and finish tasks as requested, and save at once, so that restarts do so at the same step."""
        self._look_for_requests = "no"
        try:
            found = self._requests.after(self._records.request)
        except ResetError as error:
            _log.error("the requests are read from the beginning, as their log was replaced: %s", error)
            self._records.request, self._look_for_requests = None, "now"
            return
        except OSError as error:
            _log.error("the requests cannot be read, and are read again later: %s", error)
            self._look_for_requests = "later"
            return
        for position, data in found:
            try:
                self._carry_out(TaskRequest.parsed(data))
            except SpclError as error:
                self._put_request_aside(position, data, str(error))
            self._records.request = position
            self._checkpoints.change(at_once=True)
            self._look_for_requests = "now"  # there may be more than are returned at once

    def _carry_out(self, request: TaskRequest) -> None:
        name, record = request.task, self._records.tasks.get(request.task)
        if request.do == "finish":
            if record is None or record.finished:
                raise TaskError(f"there is no running task {name!r} to finish")
            self._cut.add(name)
            self._stream.remove(name)
        elif request.announced is not None and (record is None or self._is_unknown(name)):
            self._start(request.announced)
        else:
            raise TaskError(f"there is a task {name!r} already; choose another name")

    def _start(self, announced: Announcement) -> None:
        """Let a source be what a request says, and add it, if it is new."""
        name = announced.source
        if name in self._records.tasks:
            self._sources[name].announce(announced)
            return
        record = self._new_record(name)
        probe = HubSource(self._hub, name, "", answers=record.task, encoder=record.encoder, check=self._check_announced)
        probe.announce(announced)
        record.settle(probe.description, probe.encoder)
        self._add_source(record)

    def _is_unknown(self, name: str) -> bool:
        """Whether a source is read, and nobody has said what it answers."""
        return name in self._sources and self._sources[name].description is None

    def _put_request_aside(self, position: str, data: Data | DataError, reason: str) -> None:
        """Report a request that cannot be carried out; nothing in it may stop the service, now or at its next start."""
        with suppress(SpclError):
            self._requested.discard(TaskRequest.parsed(data).key)
        try:
            self._requests.put_aside(position, data, reason)
        except OSError as error:
            reason = f"{reason} (it could not be kept: {error})"
        self._on_event(TaskEvent(time.time(), "", "refused", f"request {position}: {reason}"))

    # -- checkpoints

    def _try_to_save(self) -> None:
        try:
            self._save()
        except (SpclError, OSError) as error:
            _log.error("%s", error)
            if self._checkpoints.note_failure():
                self._on_event(SaveFailedEvent(time.time(), self.learner.steps, str(error)))
        finally:
            self._beat_at = time.monotonic()

    def _save(self) -> None:
        """Save learner, positions and records in one file; let the hub forget what all kept checkpoints hold.

        Only when no message is being put away: a checkpoint is after all messages that were read.
        """
        begin = time.monotonic()
        self._write()
        seconds, size = time.monotonic() - begin, self._path.stat().st_size
        self._stream.commit()
        if self._checkpoints.is_failing:
            _log.info("checkpoints are saved again, after step %d", self.learner.steps)
        forgettable = self._checkpoints.note_saved(self._held())
        self._trims.clear()
        self._on_event(CheckpointEvent(time.time(), self.learner.steps, seconds, size))
        if forgettable is not None:
            self._forget(forgettable)

    def _write(self) -> None:
        self._learn_schemas()
        keep = self._settings.keep_checkpoints
        self.learner.save(self._path, keep=keep, stream=self._stream, service=self._records)

    def _held(self) -> Held:
        ends = self._stream.ends
        finished = {name: ends.get(name) for name, each in self._records.tasks.items() if each.finished}
        return Held(dict(self._trims), finished, self._records.request)

    def _forget(self, held: Held) -> None:
        for name, position in held.positions.items():
            self._watch.trim(name, position)
        ends = self._stream.ends
        for name, end in held.finished.items():
            is_present = self._records.tasks[name].finished and ends.get(name) == end  # not of an earlier life
            if is_present and name not in self._ended_in_hub:
                self._ended_in_hub.add(name)
                self._watch.end(name, end)
        if held.request is not None:
            try:
                self._requests.forget(held.request)
            except OSError as error:  # they are deleted after another checkpoint
                _log.warning("requests that were carried out cannot be deleted: %s", error)

    # -- what goes wrong

    def _report_outage(self, task: str, error: Exception | None) -> None:
        if error is None:
            self._alive_since[task] = time.monotonic()
            self._on_event(TaskEvent(time.time(), task, "recovered", "its source can be read again"))
        else:
            self._on_event(TaskEvent(time.time(), task, "failed", str(error)))

    def _lose(self, task: str, error: ResetError) -> None:
        if (source := self._sources.get(task)) is not None:
            source.lose(error)

    def _report_failure(self, task: str, failure: Failure) -> None:
        _log.error("the source of task %r failed", task, exc_info=failure.exception)
        self._on_event(TaskEvent(time.time(), task, "failed", repr(failure.exception)))

    def _reject_batch(self, task: str, batch: Batch, reason: str) -> None:
        self._reject(task, Rejected(self._stream.positions[task], encode_batch(batch), reason))

    def _reject(self, task: str, rejected: Rejected) -> None:
        """Let a message be put away; if too many are, wait until they are."""
        while self._letters and not self._is_stopping():
            if self._letters < MOST_LETTERS and self._letter_bytes + len(rejected.data) <= MOST_LETTER_BYTES:
                break
            self._take_done(POLL_SECONDS)
        self._letters += 1
        self._letter_bytes += len(rejected.data)
        self._checkpoints.change()
        self._watch.put_away(task, rejected)

    def _take_all_done(self) -> bool:
        """Record all that was done in the hub; return whether there was anything."""
        found = False
        while self._take_done():
            found = True
        return found

    def _take_done(self, wait: float = 0.0) -> bool:
        """Record what was done in the hub; return whether anything was within ``wait`` seconds."""
        done = self._watch.take(wait)
        if isinstance(done, PutAway):
            self._record_letter(done)
        elif isinstance(done, Returned):
            self._return(done)
        elif isinstance(done, Ended):
            self._record_end(done)
        return done is not None

    def _record_letter(self, done: PutAway) -> None:
        self._letters -= 1
        self._letter_bytes -= len(done.rejected.data)
        reason = done.rejected.reason
        if done.error is not None:
            reason = f"{reason} (it could not be kept: {done.error})"
        if done.error is not None and done.task not in self._lost:  # on a full disk it may be all of them
            self._lost.add(done.task)
            _log.error(
                "a message of task %r was refused: %s (others that cannot be kept only count)", done.task, reason
            )
        elif (
            done.error is None and done.task not in self._warned
        ):  # thousands have mostly the same reason, and all are counted and kept
            self._warned.add(done.task)
            _log.warning("a message of task %r was refused: %s (further ones are only counted)", done.task, reason)
        self._records.tasks[done.task].dead_letters += 1
        self._on_event(DeadLetterEvent(time.time(), done.task, done.rejected.position, reason))

    def _record_end(self, done: Ended) -> None:
        record = self._records.tasks[done.task]
        if not record.may_return:
            record.may_return = True
            self._await_return(record)
            self._checkpoints.change(at_once=True)
        if not done.late:
            return
        record.late += done.late
        self._checkpoints.change(at_once=True)
        text = f"{done.late} of its messages were not learned, as it had ended; announce it again before such"
        self._on_event(TaskEvent(time.time(), done.task, "late", text))

    # -- what others ask

    def has_task(self, name: str) -> bool:
        """Return whether there is or was a task."""
        return any(record.task == name for record in list(self._records.tasks.values()))

    def has_source(self, name: str) -> bool:
        """Return whether there is or was a source."""
        return name in self._records.tasks

    def faults(self, hub_seconds: float | None = None) -> tuple[str, ...]:
        """Return what keeps the service from its work now.

        Args:
            hub_seconds: for how long the hub need not answer; ``ready_seconds`` by default, as for all else.
        """
        limit = self._settings.ready_seconds
        waits = (
            ("training has not moved", _since(self._beat_at), limit),
            ("the hub has not answered", self._watch.away_seconds, limit if hub_seconds is None else hub_seconds),
            ("no checkpoint could be saved", _since(self._checkpoints.overdue_since), limit),
        )
        return tuple(f"{text} for {seconds:.0f} s" for text, seconds, most in waits if seconds > most)

    def status(self) -> Status:
        """Return the state of the service and of its tasks."""
        records = list(self._records.tasks.values())
        saved_at = self._checkpoints.saved_at
        return Status(
            tasks=self._task_statuses(records),
            steps=self.learner.steps,
            samples=sum(each.samples for each in records),
            memory_samples=self._memory_size[0],
            memory_bytes=self._memory_size[1],
            checkpoint_time=saved_at,
            checkpoint_age=None if saved_at is None else max(0.0, time.time() - saved_at),
            uptime=_since(self._began),
            running=True,
            beat_age=_since(self._beat_at),
            hub_away=self._watch.away_seconds,
            unsaved=_since(self._checkpoints.unsaved_since),
            save_failures=self._checkpoints.failures,
            faults=self.faults(),
            refused_names=tuple(islice(self._refused_names.values(), MOST_REFUSED)),
        )

    def _task_statuses(self, records: list[TaskRecord]) -> list[TaskStatus]:
        silences, lags, failed = self._silences(), self._stream.lag, set(self._stream.failed)
        backlogs, last_seen = self._watch.backlogs, self._stream.last_seen
        silent = {name for name, seconds in silences.items() if seconds > self._settings.tasks.silence_seconds}
        found = []
        for record in records:
            source, name = self._sources.get(record.name), record.name
            schema = record.schema if source is None else source.description
            encoder = record.encoder if source is None else source.encoder
            has_failed = name in failed or (source is not None and source.is_out)
            found.append(
                TaskStatus(
                    name=name,
                    task=record.task if schema is None else schema.name,
                    encoder=encoder,
                    kind=None if schema is None else schema.kind,
                    classes=None if schema is None else schema.classes,
                    state=_state(record, has_failed, schema is not None, name in silent),
                    batches=record.batches,
                    samples=record.samples,
                    skipped=record.skipped,
                    lag_seconds=lags.get(name, 0.0),
                    backlog=backlogs.get(name, 0),
                    last_seen=last_seen.get(name),
                    dead_letters=record.dead_letters,
                    late=record.late,
                    waits_for=self._awaited(record, schema is not None),
                )
            )
        return found

    def _awaited(self, record: TaskRecord, is_known: bool) -> str | None:
        """Return what has to happen before a task begins or ends; None where it waits for nothing."""
        if record.finished:
            return None
        if ("finish", record.name) in self._requested:
            return END_REQUESTED
        if is_known:
            return None
        if self._settings.tasks.start == "first-sight":
            return "its first batch"
        return "its kind and classes: a start message in its stream, or POST /tasks"


def _state(record: TaskRecord, has_failed: bool, is_known: bool, is_silent: bool) -> TaskState:
    if record.finished:
        return "finished"
    if has_failed:
        return "failed"
    if not is_known:
        return "waiting"
    return "silent" if is_silent else "running"


def _since(begin: float | None) -> float:
    """Return the seconds since a time (``time.monotonic()``); 0 without one."""
    return 0.0 if begin is None else time.monotonic() - begin


class Trainer:
    """Trains the learner of a service by :meth:`spcl.learner.Learner.fit`, and outlives whatever its batches hold.

    Args:
        learner: the learner.
        settings: with which its tasks are made.
        records: of all tasks; the tasks of the moments have a schema.
        on_event: receives what happens.
        reject: called as ``reject(task, batch, reason)`` with a batch that cannot be learned.
        clock: the time in seconds, which never goes back.
    """

    def __init__(
        self,
        learner: Learner,
        settings: RunSettings,
        records: Records,
        on_event: Callable[[Event], object],
        reject: Callable[[str, Batch, str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner = learner
        self._settings = settings
        self._records = records
        self._on_event = on_event
        self._reject = reject
        self._clock = clock
        self._moment: Moment | None = None  # that is being learned
        self._done: set[str] = set()  # its batches that were learned or skipped
        self._has_warned = False
        self._began = self._measure_at = clock()
        self._is_measured = False  # the step that began then
        self._accuracies: dict[str, float] = {}

    def train(self, moments: Iterable[Moment]) -> None:
        """Add the sources that are new, learn the batches, and finish those that ended, until the moments end."""
        noted = self._noted(moments)
        while True:
            try:
                self._fit(noted)
            except Exception as error:  # of the learner, which is as it was before the step
                if self._moment is None:  # of the moments
                    raise
                self._learn_apart(self._moment, error)
            else:
                return

    def _noted(self, moments: Iterable[Moment]) -> Iterator[Moment]:
        for moment in moments:
            new = tuple(name for name in moment.batches if name not in self._learner.active_sources)
            self._moment, self._done = replace(moment, started=new), set()
            yield self._moment
            self._moment = None

    def _fit(self, moments: Iterable[Moment]) -> None:
        self._learner.fit(
            moments,
            on_start=self._add_source,
            before_step=self._test,
            on_step=self._report,
            on_refused=self._refuse,
        )

    def _add_source(self, name: str) -> None:
        announced, learner = self._records.tasks[name].announced, self._learner
        try:
            if announced.task.name not in learner.tasks:
                add_task(learner, announced.task, self._settings)
            if name not in learner.sources or announced.encoder is not None:
                learner.add_source(name, task=announced.task.name, encoder=announced.encoder)
        except SpclError as error:
            raise TaskError(str(error)) from error
        except Exception as error:  # such as a head that does not fit into memory
            raise TaskError(f"{type(error).__name__}: {error}") from error
        self._on_event(TaskEvent(time.time(), name, "started", f"{announced}"))

    def _refuse(self, name: str, batch: Any, error: SpclError) -> None:
        self._reject(name, batch, str(error))

    def _learn_apart(self, moment: Moment, error: Exception) -> None:
        """Learn the batches of a moment one by one after an error that is of no batch alone, or of exhausted memory.

        A batch that raises such an error alone is refused like any other: if the service ended instead, the batch would
        be the first that its next start reads.
        """
        if not self._has_warned:
            self._has_warned = True
            kind = type(error).__name__
            _log.warning("a moment is learned batch by batch, as together it raised %s: %s", kind, error)
        if is_out_of_memory(error):
            gc.collect()
            torch.cuda.empty_cache()
        for name, batch in moment.batches.items():
            if name in self._done:
                continue
            try:
                new = (name,) if name in moment.started else ()
                self._fit([Moment(moment.step, {name: batch}, new, ())])
            except Exception as alone:
                self._reject(name, batch, f"{type(alone).__name__}: {alone}")
        for name in moment.ended:
            try:
                if name in self._learner.active_sources:
                    self._learner.finish_source(name)
            except Exception as failure:  # of a memory, perhaps: it would fail again after every restart
                _log.exception("task %r cannot be finished in the learner", name)
                text = f"it cannot be finished in the learner: {failure!r}"
                self._on_event(TaskEvent(time.time(), name, "failed", text))

    def _test(self, batches: Mapping[str, Any]) -> None:
        """Test classifiers on their batches before these are learned, if it is time to."""
        self._began, self._accuracies = self._clock(), {}
        self._is_measured = self._began >= self._measure_at
        if not self._is_measured:
            return
        sources = self._learner.sources
        known = [name for name in batches if sources[name].task.classes is not None and sources[name].signature]
        with self._measuring(), suppress(Exception):  # what cannot be predicted cannot be learned: the step says so
            self._accuracies = {name: self._learner.evaluate([batches[name]], source=name) for name in known}

    def _report(self, report: StepReport) -> None:
        """Count what was learned, and report the step."""
        assert self._moment is not None
        seconds, samples = self._clock() - self._began, {}
        for name, (_, y) in self._moment.batches.items():
            record = self._records.tasks[name]
            if name in report.skipped:
                record.skipped += 1
                self._done.add(name)
            elif name in report.losses:
                self._done.add(name)
                samples[name] = y.shape[0]
                record.batches += 1
                record.samples += y.shape[0]
        before, after = self._kappas(report) if self._is_measured else (None, None)
        self._on_event(
            StepEvent(
                time=time.time(),
                step=report.step,
                samples=samples,
                losses=report.losses,
                accuracies=self._accuracies,
                kappa_before=before,
                kappa_after=after,
                skipped=tuple(report.skipped),
                seconds=seconds,
            )
        )

    def _kappas(self, report: StepReport) -> tuple[float | None, float | None]:
        """Return κ before and after, as far as the method computed gradients for it."""
        with self._measuring():
            kappas = [None if each is None else each.condition_number for each in (report.before, report.after)]
        return kappas[0], kappas[1]

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Time the block, and schedule the next measurement so that measuring takes at most 1 % of elapsed time.

        Time without batches counts, so that where batches come rarely all are measured, but it is not saved up.
        """
        begin = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            self._measure_at = max(self._measure_at, end) + (end - begin) / MEASURING_SHARE
