"""The HTTP interface of a service: predictions, tasks, health, metrics, and events as they happen."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, get_args

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field, ValidationError

from spcl.batches import Inputs, describe
from spcl.errors import DataError
from spcl.learner.prediction import named_classes
from spcl.serve.events import Changes, Cursor, History, Status, TaskState, TaskStatus, Totals
from spcl.serve.service import Service, Snapshot
from spcl.serve.settings import InputSettings
from spcl.sources.wire import decode_inputs
from spcl.tasks import Kind

STATUS_SECONDS = 0.25
"""For how long all who ask get the same status."""

HUB_SECONDS = 2.0
"""After how long a hub that does not answer is told with the health; readiness gives it ``ready_seconds``."""

PREDICTIONS_AT_ONCE = 4
"""Predictions that are computed at the same time; more would only take the processor from each other."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BINARY = ("application/vnd.safetensors", "application/octet-stream")

_log = logging.getLogger(__name__)


# -- metrics


class Metrics(Collector):
    """Metrics of one service; nothing is counted here but the time of predictions, so that steps cost nothing more.

    Args:
        totals: returns the totals of the events so far.
        status: returns the present status.
    """

    def __init__(self, totals: Callable[[], Totals], status: Callable[[], Status]) -> None:
        self._totals = totals
        self._status = status
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.predict_seconds = Histogram(
            "spcl_predict_seconds", "Time of a prediction, from the whole request on.", registry=self._registry
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of steps, tasks, memory and checkpoints."""
        totals, status = self._totals(), self._status()
        yield from _step_metrics(totals, status)
        yield from _task_metrics(totals, status.tasks)


def _step_metrics(totals: Totals, status: Status) -> Iterable[Metric]:
    yield _counter("spcl_steps", "Steps since the process started.", totals.steps)
    yield _counter("spcl_step_seconds", "Time spent in steps.", totals.seconds)
    yield _gauge("spcl_learner_steps", "Steps of the learner, over all restarts.", status.steps)
    yield _gauge("spcl_kappa_before", "Condition number of the gradients in the latest step.", totals.kappa_before)
    yield _gauge("spcl_kappa_after", "Condition number of the adjusted gradients.", totals.kappa_after)
    yield _gauge("spcl_memory_samples", "Samples in memory.", status.memory_samples)
    yield _gauge("spcl_memory_bytes", "Size of the memory's content.", status.memory_bytes)
    text = "Age of the oldest thing that is in no checkpoint; 0 while there is nothing to save."
    yield _gauge("spcl_checkpoint_age_seconds", text, status.unsaved)
    yield _counter("spcl_save_failures", "Checkpoints that could not be saved.", status.save_failures)
    if totals.checkpoint is not None:
        yield _gauge("spcl_checkpoint_seconds", "Time that the latest checkpoint took.", totals.checkpoint.seconds)
        yield _gauge("spcl_checkpoint_bytes", "Size of the latest checkpoint.", totals.checkpoint.bytes)
    yield _gauge("spcl_ready", "1 while nothing keeps the service from its work.", not status.faults)
    yield _gauge("spcl_beat_age_seconds", "Time since training last moved on.", status.beat_age)
    yield _gauge("spcl_hub_away_seconds", "Time for which the hub has not answered.", status.hub_away)
    yield _gauge("spcl_uptime_seconds", "Time since the process started.", status.uptime)


def _task_metrics(totals: Totals, tasks: Iterable[TaskStatus]) -> Iterable[Metric]:
    listed = list(tasks)
    by_source = partial(_by_source, {each.name: each.task for each in listed})
    yield by_source(
        CounterMetricFamily, "spcl_samples", "New samples learned since the process started.", totals.samples
    )
    yield by_source(
        CounterMetricFamily, "spcl_skipped", "Batches skipped because they were not finite.", totals.skipped
    )
    yield by_source(CounterMetricFamily, "spcl_dead_letters", "Messages that were refused.", totals.dead_letters)
    yield by_source(GaugeMetricFamily, "spcl_loss", "Loss in the latest step.", totals.losses)
    text = "Accuracy on the latest batch that was tested before training on it."
    yield by_source(GaugeMetricFamily, "spcl_prequential_accuracy", text, totals.accuracies)
    lags = {each.name: each.lag_seconds for each in listed}
    yield by_source(GaugeMetricFamily, "spcl_lag_seconds", "Time for which the next batch has been awaited.", lags)
    backlogs = {each.name: each.backlog for each in listed}
    yield by_source(GaugeMetricFamily, "spcl_backlog_batches", "Batches that wait to be learned.", backlogs)
    late = {each.name: each.late for each in listed}
    yield by_source(
        GaugeMetricFamily, "spcl_late_messages", "Messages not learned because their source had ended.", late
    )
    states = GaugeMetricFamily("spcl_tasks", "Sources by state.", labels=["state"])
    for state in get_args(TaskState):
        states.add_metric([state], sum(task.state == state for task in listed))
    yield states


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """Return a metric with one value, or with none."""
    return GaugeMetricFamily(name, text, value=value)


def _by_source(
    tasks: Mapping[str, str],
    family: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    values: Mapping[str, float | None],
) -> Metric:
    """Return a metric with a value for each source, which is labelled with its task, too."""
    metric = family(name, text, labels=["task", "source"])
    for source, value in values.items():
        if value is not None:
            metric.add_metric([tasks.get(source, source), source], value)
    return metric


# -- routes


def part_of_app(name: str) -> Any:
    """Return the dependency of a route on what the application has under a name."""

    def get(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(get)


TheService = Annotated[Service, part_of_app("service")]
TheInputs = Annotated[InputSettings, part_of_app("inputs")]
TheMetrics = Annotated[Metrics, part_of_app("metrics")]
TheLimiter = Annotated[CapacityLimiter, part_of_app("limiter")]

router = APIRouter()

# -- predictions


class PredictBody(BaseModel, extra="forbid"):
    """Samples to predict, as nested lists with one entry per sample, or an object of them for inputs with parts."""

    inputs: list[Any] | dict[str, list[Any]]


class Predicted(BaseModel):
    """The most probable class of a sample."""

    task: str
    label: str = Field(alias="class")
    probability: float


class Predictions(BaseModel):
    """Predictions for all samples of a request."""

    step: int = Field(description="The number of steps after which the weights were copied.")
    predictions: list[Predicted] | None = Field(description="Most probable classes; null for a task without classes.")
    classes: list[tuple[str, str]] | None = Field(description="(task, class) of every column of the outputs.")
    outputs: list[Any] = Field(description="A row per sample: probabilities, or what the task's own head gives.")


PREDICT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": PredictBody.model_json_schema()},
            BINARY[0]: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post("/predict", openapi_extra=PREDICT_BODY, tags=["predictions"])
async def predict(
    request: Request,
    service: TheService,
    inputs: TheInputs,
    limiter: TheLimiter,
    metrics: TheMetrics,
    task: Annotated[str | None, Query(description="The samples' task.")] = None,
    source: Annotated[str | None, Query(description="The samples' source, whose task and encoder it uses.")] = None,
) -> Predictions:
    """Predict samples with the weights of the latest checkpoint, without waiting for training."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()

    def answer() -> Predictions:
        snapshot = _snapshot(service, task, source)
        return _predict(snapshot, _samples(kind, body, inputs), task, source)

    with metrics.predict_seconds.time():
        return await run_sync(answer, limiter=limiter)


def _snapshot(service: Service, task: str | None, source: str | None) -> Snapshot:
    """Return the latest snapshot; answer 503 before there is one with task and source, 404 if there will be none."""
    if task is not None and not service.has_task(task):
        raise HTTPException(404, f"there is no task {task!r}; GET /tasks lists all")
    if source is not None and not service.has_source(source):
        raise HTTPException(404, f"there is no source {source!r}; GET /tasks lists all")
    snapshot = service.snapshot
    if (
        snapshot is None
        or not {task} <= {None, *snapshot.model.tasks}
        or not {source} <= {None, *snapshot.model.sources}
    ):
        raise HTTPException(503, "there is no checkpoint with this task yet; ask again later", {"Retry-After": "5"})
    return snapshot


def _samples(kind: str, body: bytes, inputs: InputSettings) -> Inputs:
    """Return the samples in the body of a request."""
    if kind in BINARY:
        return decode_inputs(body)
    if kind != "application/json":
        raise HTTPException(415, f"the content type is {kind!r}; send application/json or {BINARY[0]}")
    try:
        return inputs.samples(PredictBody.model_validate_json(body).inputs)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _predict(snapshot: Snapshot, x: Inputs, task: str | None, source: str | None) -> Predictions:
    """Predict probabilities of classes, of the task's or of all, or the output of a task's own head.

    A source predicts through its encoder. Without one the samples are somebody's who was never trained.
    """
    model = snapshot.model
    if source is not None and (answers := model.sources[source].task.name) != (task or answers):
        raise DataError(f"source {source!r} answers task {answers!r}, not {task!r}; give one of the two")
    asked = task
    if asked is None and source is not None and model.scenario != "class":
        asked = model.sources[source].task.name
    tasks = model.model.classifiers if asked is None else [model.tasks[asked]]
    known = {each.signature[0] for each in tasks if each.signature is not None}
    if known and describe(x, 1) not in known:
        raise DataError(f"the inputs are samples of {describe(x, 1)}, but expected are {' or '.join(sorted(known))}")
    has_classes = asked is None or model.tasks[asked].classes is not None
    predict = model.predict_proba if has_classes else model.predict
    outputs = predict(x, task, source=source).cpu()
    if not outputs.isfinite().all():
        raise DataError("the predictions are not finite; send inputs that are finite and not too large")
    if not has_classes:
        return Predictions(step=snapshot.step, predictions=None, classes=None, outputs=outputs.tolist())
    classes = [pair for each in tasks for pair in named_classes(each)]
    probabilities, indices = outputs.max(dim=1)
    best = [
        Predicted.model_validate({"task": classes[index][0], "class": classes[index][1], "probability": probability})
        for index, probability in zip(indices.tolist(), probabilities.tolist(), strict=True)
    ]
    return Predictions(step=snapshot.step, predictions=best, classes=classes, outputs=outputs.tolist())


# -- tasks


class NewTask(BaseModel, extra="forbid"):
    """A source to start, and its task."""

    name: str = Field(min_length=1, max_length=200)
    kind: Kind = "classification"
    classes: int | list[str] | None = Field(None, description="The number of classes or outputs, or their names.")
    task: str | None = Field(None, description="The task that it answers, by default one of its own name.")
    encoder: str | dict[str, Any] | None = Field(None, description="The name of its encoder, or name and options.")


@router.get("/tasks", tags=["tasks"])
def tasks(service: TheService) -> Status:
    """Return the state of all sources with their tasks, and of the service."""
    return service.status(STATUS_SECONDS)


@router.post("/tasks", status_code=202, tags=["tasks"])
def start_task(task: NewTask, service: TheService) -> NewTask:
    """Start a source of a task between two steps; the same happens when it announces itself."""
    service.start_task(task.name, kind=task.kind, classes=task.classes, task=task.task, encoder=task.encoder)
    return task


@router.post("/tasks/{name}/finish", status_code=202, tags=["tasks"])
def finish_task(name: str, service: TheService) -> TaskStatus:
    """End a source between two steps: from then on it is replayed from memory. Return its state until then."""
    return service.finish_task(name)


# -- operation


class Health(BaseModel):
    """That the service is alive, whether it can predict yet, and what is wrong."""

    status: Literal["ok", "degraded"]
    ready: bool
    faults: list[str]


class Readiness(BaseModel):
    """Whether the service does its work, and what keeps it from it."""

    ready: bool
    faults: list[str]


@router.get("/healthz", tags=["operation"])
def health(service: TheService) -> Health:
    """Return that the service is alive, also where something is wrong; it can predict once there is a checkpoint."""
    faults, can_predict = (
        service.faults(HUB_SECONDS),
        service.snapshot is not None and bool(service.snapshot.model.tasks),
    )
    return Health(status="degraded" if faults else "ok", ready=can_predict, faults=list(faults))


@router.get("/readyz", tags=["operation"])
def readiness(service: TheService, response: Response) -> Readiness:
    """Return whether the service does its work, or 503 and what keeps it from it."""
    faults = service.faults()
    if faults:
        response.status_code = 503
    return Readiness(ready=not faults, faults=list(faults))


@router.get("/metrics", response_class=Response, tags=["operation"])
def metrics(metrics: TheMetrics) -> Response:
    """Return metrics in Prometheus' text format."""
    return Response(metrics.text(), media_type=METRICS_TYPE)


# -- events

UPDATE_SECONDS = 1.0
"""How often readers get what is new."""

SOONEST_SECONDS = 0.1
"""After how long a new reader need not wait for the next update."""

SHARE = 0.1
"""The largest part of the time that updates for new readers take."""

MOST_UPDATES = 60
"""Updates that wait for a slow reader; then its stream ends, and it may begin anew."""

Reader = asyncio.Queue[bytes | None]


class Feed:
    """Sends every second what is new to all readers, and all that is known to a new one.

    Args:
        service: whose status is sent.
        history: of the events that are sent.
    """

    def __init__(self, service: Service, history: History) -> None:
        self._service = service
        self._history = history
        self._cursor = Cursor()  # of the readers that follow
        self._new: set[Reader] = set()
        self._following: set[Reader] = set()
        self._has_new = asyncio.Event()
        self._is_closed = False

    def close(self) -> None:
        """End the streams of all readers within a second; may be called from any thread."""
        self._is_closed = True

    async def read(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until the feed is closed."""
        reader: Reader = asyncio.Queue(MOST_UPDATES)
        self._new.add(reader)
        self._has_new.set()
        try:
            while not self._is_closed and (update := await reader.get()) is not None:
                yield update
        finally:
            self._new.discard(reader)
            self._following.discard(reader)

    async def run(self) -> None:
        """Record the lags of tasks and send updates, until the feed is closed."""
        while not self._is_closed:
            begin = time.monotonic()
            new, self._new = self._new, set()
            self._has_new.clear()
            try:
                first, next_ = await run_sync(self._updates, bool(new), bool(self._following))
            except Exception:  # the next one may be possible
                _log.exception("an update of the events cannot be made")
                first = next_ = b""
            for reader in list(self._following):
                self._send(reader, next_)
            for reader in new:
                self._following.add(reader)
                self._send(reader, first)
            end = time.monotonic()
            await asyncio.sleep(min(max(SOONEST_SECONDS, (end - begin) / SHARE), UPDATE_SECONDS))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_new.wait(), max(0.0, begin + UPDATE_SECONDS - time.monotonic()))
        for reader in self._following | self._new:
            self._send(reader, None)

    def _send(self, reader: Reader, update: bytes | None) -> None:
        try:
            reader.put_nowait(update)
        except asyncio.QueueFull:
            self._following.discard(reader)
            while not reader.empty():
                reader.get_nowait()
            reader.put_nowait(None)

    def _updates(self, has_new: bool, has_following: bool) -> tuple[bytes, bytes]:
        """Return the first update of new readers, and the next of the others; in a thread, as it may wait for locks."""
        status = self._service.status(UPDATE_SECONDS / 2)
        self._history.add_lags({task.name: task.lag_seconds for task in status.tasks})
        cursors = [*[Cursor()] * has_new, *[self._cursor] * has_following]
        if not cursors:
            return b"", b""
        changes = self._history.since_each(*cursors)
        self._cursor = changes[0].cursor
        text = json.dumps(status.as_json(), separators=(",", ":"))
        updates = [_update(each, text) for each in changes]
        return updates[0], updates[-1]


def _update(changes: Changes, status: str) -> bytes:
    events = "".join(_message(name, json.dumps(event, separators=(",", ":"))) for name, event in changes.events)
    parts = {
        "reset": json.dumps(changes.reset),
        "interval": json.dumps(changes.interval),
        "buckets": f"[{','.join(changes.buckets)}]",
        "time": json.dumps(time.time()),
        "status": status,
    }
    content = ",".join(f'"{name}":{part}' for name, part in parts.items())
    return f"{events}{_message('update', f'{{{content}}}')}".encode()


def _message(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


TheFeed = Annotated[Feed, part_of_app("feed")]


@router.get("/events", response_class=StreamingResponse, tags=["operation"])
async def events(feed: TheFeed) -> StreamingResponse:
    """Stream events and every second an ``update``: steps and status.

    Events are ``task``, ``checkpoint``, ``save-failed`` and ``dead-letter``. The first update holds the history since
    the process started.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.read(), media_type="text/event-stream", headers=headers)
