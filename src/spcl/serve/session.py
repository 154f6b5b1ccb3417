"""A service while it runs: learner, live stream and records, saved together."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from spcl.batches import Batch, describe
from spcl.checkpoint import has_checkpoint
from spcl.errors import SpclError
from spcl.serve.build import load_learner, new_learner
from spcl.serve.events import CheckpointEvent, DeadLetterEvent, Event, TaskEvent
from spcl.serve.records import Records, TaskRecord
from spcl.serve.requests import Requests
from spcl.serve.samples import example_inputs
from spcl.serve.settings import ServeSettings
from spcl.serve.trainer import Trainer
from spcl.serve.watch import Watch
from spcl.sources import Hub, HubError, HubSource, Rejected, ResetError, Schema, check_task_name, encode_batch
from spcl.streams import Failure, LiveStream

__all__ = ["Session", "StoppedError"]

CHECKPOINT = "learner.safetensors"
CAPACITY = 8  # batches of a task that are read ahead
IDLE_SECONDS = 0.1
TICK_SECONDS = 1.0
RETRY_SECONDS = 0.2

_log = logging.getLogger(__name__)


class StoppedError(SpclError):
    """A service that was stopped while a message could not be put away; it is read again next time."""


class Session:
    """Everything that exists while a service holds its state; all methods are called from one thread.

    Args:
        settings: of the service.
        hub: where the tasks are.
        on_event: receives events, from several threads.
        is_stopping: whether the service is to end.

    Attributes:
        learner, records, requests, stream, sources, watch: its parts.
        alive_since: when each source was added or could be reached again, whichever is later (``time.monotonic()``).
        memory_size: samples and bytes in memory, updated once a second.
        saved_at: when the last checkpoint was saved (``time.time()``); None before.
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
        self._inputs = describe(example_inputs(settings.inputs.spec()), 1)
        self.records = Records()
        self.requests = Requests(settings.state)
        self.sources: dict[str, HubSource] = {}
        self.alive_since: dict[str, float] = {}
        self.memory_size = (0, 0)
        self.saved_at: float | None = None
        self.stream = LiveStream(
            capacity=CAPACITY,
            patience=IDLE_SECONDS,
            keep_open=True,
            together=settings.together,
            on_failure=self._report_failure,
            on_rejected=self._reject,
        )
        self.watch = Watch(hub, self.positions, self._lose)
        self._has_requests = True
        self._unsaved = 0  # checkpoints until everything is in two of them
        self._due_at = time.monotonic() + settings.checkpoint_seconds
        self._tick_at = 0.0
        self._ignored: set[str] = set()
        self._warned: set[str] = set()
        self._forgotten: set[str] = set()
        self._forgettable: tuple[list[str], str | None] = ([], None)  # finished tasks and request, last saved
        self._load()

    # -- the loop

    def advance(self) -> None:
        """Carry out requests, add and end tasks, learn the next moment, and save if it is time to."""
        if self._has_requests:
            self._carry_out_requests()
        self._add_found_tasks()
        if time.monotonic() >= self._tick_at:
            self._tick()
        moment = next(iter(self.stream), None)
        if moment is not None:
            self._learn_schemas()
            self._trainer.train(moment)
            self._unsaved = 2
        self._record_ends()
        if self._unsaved and time.monotonic() >= self._due_at:
            try:
                self.save()
            except SpclError as error:  # a full disk may have space later; nothing is lost meanwhile
                _log.error("%s", error)
                self._due_at = time.monotonic() + max(TICK_SECONDS, self._settings.checkpoint_seconds)

    def request(self) -> None:
        """Let the next :meth:`advance` look for requests; may be called from any thread."""
        self._has_requests = True

    def is_starting(self, task: str) -> bool:
        """Return whether there is a request to start a task that was not carried out; may be called from any thread."""
        waiting = self.requests.after(self.records.request)
        return any(request["do"] == "start" and request["task"] == task for _, request in waiting)

    def save(self) -> None:
        """Save learner, positions and records in one file, and then let the hub forget what two checkpoints hold."""
        begin = time.monotonic()
        self._write()
        self.saved_at = time.time()
        self._unsaved = max(0, self._unsaved - 1)
        self._due_at = time.monotonic() + self._settings.checkpoint_seconds
        seconds, size = time.monotonic() - begin, self._path.stat().st_size
        self._on_event(CheckpointEvent(self.saved_at, self.learner.steps, seconds, size))
        if self._forget():
            self._write()  # what was counted: the hub does not have it any more

    def _write(self) -> None:
        self._learn_schemas()
        self.learner.save(self._path, stream=self.stream, service=self.records)

    def close(self) -> None:
        """Stop reading."""
        self.watch.close()
        self.stream.close()

    def positions(self) -> dict[str, str | None]:
        """Return how far each task that has not finished is learned."""
        known = self.stream.positions
        return {name: known.get(name) for name, record in list(self.records.tasks.items()) if not record.finished}

    # -- the beginning

    def _load(self) -> None:
        run_settings, inputs = self._settings.run_settings(), self._settings.inputs.spec()
        if run_settings.threads is not None:
            torch.set_num_threads(run_settings.threads)
        if has_checkpoint(self._path):
            self.learner = load_learner(self._path, run_settings, inputs, self.records, self.stream)
            self.saved_at = self._path.stat().st_mtime if self._path.exists() else None
            self._unsaved, self._forgettable = 1, self._done()
        else:
            self.learner = new_learner(run_settings, inputs, self.records)
        self._trainer = Trainer(self.learner, run_settings, self.records, self._on_event, self._reject_batch)
        for record in self.records.tasks.values():
            if not record.finished:
                self._add_source(record)
        self.watch.start()

    # -- tasks

    def _add_found_tasks(self) -> None:
        for name in self.watch.tasks:
            if name in self.records.tasks or name in self._ignored:
                continue
            try:
                self._add_task(check_task_name(name), None)
            except SpclError as error:
                self._ignored.add(name)
                self._on_event(TaskEvent(time.time(), name, "failed", str(error)))

    def _add_task(self, name: str, schema: Schema | None) -> None:
        self.records.tasks[name] = TaskRecord(name, schema)
        self._add_source(self.records.tasks[name])

    def _add_source(self, record: TaskRecord) -> None:
        tasks = self._settings.tasks
        sight: Schema | Literal["infer"] = "infer" if tasks.classes is None else Schema.of(tasks.kind, tasks.classes)
        source = HubSource(
            self._hub,
            record.name,
            self._inputs,
            schema=record.schema,
            first_sight=sight if tasks.start == "first-sight" else None,
            max_bytes=self._settings.max_bytes,
            trim=self.watch.trim,
            on_outage=self._report_outage,
        )
        self.sources[record.name] = source
        self.alive_since[record.name] = time.monotonic()
        self.stream.add(record.name, source)

    def _carry_out_requests(self) -> None:
        """Start and finish tasks as requested, and save at once, so that restarts do so at the same step."""
        self._has_requests = False
        for position, request in self.requests.after(self.records.request):
            name, record = request["task"], self.records.tasks.get(request["task"])
            if request["do"] == "finish" and record is not None and not record.finished:
                self.stream.remove(name)
            elif request["do"] == "start" and record is None:
                self._add_task(name, Schema.parsed(request["schema"]))
            elif request["do"] == "start" and name in self.sources and self.sources[name].schema is None:
                self.sources[name].announce(Schema.parsed(request["schema"]))
            self.records.request = position
            self._unsaved, self._due_at = 2, 0.0

    def _learn_schemas(self) -> None:
        for name, source in self.sources.items():
            if self.records.tasks[name].schema is None:
                self.records.tasks[name].schema = source.schema

    def _record_ends(self) -> None:
        for name in self.stream.ended:
            record = self.records.tasks[name]
            if not record.finished:
                record.finished = True
                self.sources.pop(name).close()
                self._unsaved = 2
                self._on_event(TaskEvent(time.time(), name, "ended", f"after {record.batches} batches"))

    def _tick(self) -> None:
        self._tick_at = time.monotonic() + TICK_SECONDS
        if self.learner.memory is not None:
            self.memory_size = len(self.learner.memory), self.learner.memory.nbytes
        if self._settings.tasks.end == "silence":
            queued = self.stream.queued
            for name, seconds in self.silences().items():
                if seconds > self._settings.tasks.silence_seconds and not queued.get(name):
                    self.stream.remove(name)

    def silences(self) -> dict[str, float]:
        """Return for how long each task that is known has had no message, up to the last time when its hub said so."""
        now, lags = time.monotonic(), self.stream.lag
        return {
            name: source.quiet_at - max(now - lags[name], self.alive_since[name])
            for name, source in list(self.sources.items())
            if name in lags and source.schema is not None
        }

    # -- what goes wrong

    def _report_outage(self, task: str, error: Exception | None) -> None:
        if error is None:
            self.alive_since[task] = time.monotonic()
            self._on_event(TaskEvent(time.time(), task, "recovered", "its source can be read again"))
        else:
            self._on_event(TaskEvent(time.time(), task, "failed", str(error)))

    def _lose(self, task: str, error: ResetError) -> None:
        if (source := self.sources.get(task)) is not None:
            source.lose(error)

    def _report_failure(self, task: str, failure: Failure) -> None:
        _log.error("the source of task %r failed", task, exc_info=failure.exception)
        self._on_event(TaskEvent(time.time(), task, "failed", repr(failure.exception)))

    def _reject_batch(self, task: str, batch: Batch, reason: str) -> None:
        self._reject(task, Rejected(self.stream.positions[task], encode_batch(batch), reason))

    def _reject(self, task: str, rejected: Rejected) -> None:
        """Put a message away, and report it."""
        reason = rejected.reason
        try:
            self._put_away(task, rejected)
        except StoppedError:
            raise
        except Exception as error:  # a full disk, or whatever it is of any hub, must not stop the other tasks
            reason = f"{reason} (it could not be kept: {error})"
            _log.error("message %s of task %r: %s", rejected.position, task, reason)
        self._warn_of_first(task, reason)
        self.records.tasks[task].dead_letters += 1
        self._unsaved = 2
        self._on_event(DeadLetterEvent(time.time(), task, rejected.position, reason))

    def _warn_of_first(self, task: str, reason: str) -> None:
        """Log one refused message of a task: thousands have mostly the same reason, and all are counted and kept."""
        if task not in self._warned:
            self._warned.add(task)
            _log.warning("a message of task %r was refused: %s (others of it only count)", task, reason)

    def _put_away(self, task: str, rejected: Rejected) -> None:
        """Try until the hub can be reached: only then may a checkpoint be after the message."""
        while not self._is_stopping():
            try:
                self._hub.dead_letter(task, rejected.position, rejected.data, rejected.reason)
            except HubError as error:
                _log.warning("%s", error)
                time.sleep(RETRY_SECONDS)
            else:
                return
        raise StoppedError(f"stopped before a message of task {task!r} could be put away")

    def _succeeds(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except OSError as error:
            _log.warning("%s", error)
            return False
        return True

    def _forget(self) -> bool:
        """Let the hub delete what the checkpoint before the last holds, too; later, if it cannot be reached.

        Return whether that was more than was learned.
        """
        before = [record.late for record in self.records.tasks.values()]
        (finished, request), self._forgettable = self._forgettable, self._done()
        self.stream.commit()
        for name in set(finished) - self._forgotten:
            if self._succeeds(partial(self._end_in_hub, name)):
                self._forgotten.add(name)
        if request is not None:
            self._succeeds(partial(self.requests.forget, request))
        return before != [record.late for record in self.records.tasks.values()]

    def _end_in_hub(self, task: str) -> None:
        """Count the messages of a task that came too late, and delete its stream."""
        end = self.stream.ends.get(task)
        late = 0 if end is None else self.watch.backlog(task, end)
        self._hub.end(task)
        if late:
            self.records.tasks[task].late += late
            text = f"{late} of its messages were not learned, as it had ended; publish such under another name"
            _log.warning("task %r: %s", task, text)
            self._on_event(TaskEvent(time.time(), task, "late", text))

    def _done(self) -> tuple[list[str], str | None]:
        """Return the finished tasks, and the last request that was carried out."""
        return [name for name, each in self.records.tasks.items() if each.finished], self.records.request
