"""The HTTP interface of a service: predictions, tasks, health, metrics, and events as they happen."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, ValidationError

from spcl.errors import DataError
from spcl.models import InputSpec
from spcl.serve.history import Cursor, History
from spcl.serve.metrics import CONTENT_TYPE, Metrics
from spcl.serve.predictor import Prediction, Predictor
from spcl.serve.samples import samples_from_lists
from spcl.serve.service import Service, TaskExistsError
from spcl.serve.status import Status
from spcl.sources import Kind
from spcl.sources.wire import decode_inputs

__all__ = ["Api", "Health", "NewTask", "Predicted", "Predictions"]

UPDATE_SECONDS = 1.0
"""How often readers of events get what is new."""

PREDICTIONS_AT_ONCE = 4
"""Predictions that are computed at the same time; more would only take the processor from each other."""

BINARY = ("application/vnd.safetensors", "application/octet-stream")


class Samples(BaseModel, extra="forbid"):
    """Samples to predict, as nested lists with one entry per sample, or an object of them for inputs with parts."""

    inputs: list[Any] | dict[str, list[Any]]


PREDICT_BODY = {
    "application/json": {"schema": Samples.model_json_schema()},
    BINARY[0]: {"schema": {"type": "string", "format": "binary"}},
}


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


class NewTask(BaseModel, extra="forbid"):
    """A task to start."""

    name: str = Field(min_length=1, max_length=200)
    kind: Kind = "classification"
    classes: int | list[str] | None = Field(None, description="The number of classes or outputs, or their names.")


class Health(BaseModel):
    """Whether the service is alive, and whether it can predict yet."""

    status: str
    ready: bool


class Api:
    """The routes of a service.

    Args:
        service: trains; its predictor, status and tasks are what is served.
        inputs: shapes and types of samples.
        history: of the service's events.
        metrics: of the service.
    """

    def __init__(self, service: Service, inputs: InputSpec, history: History, metrics: Metrics) -> None:
        self._service = service
        self._inputs = inputs
        self._history = history
        self._metrics = metrics
        self._limiter = CapacityLimiter(PREDICTIONS_AT_ONCE)
        self._is_closed = False

    def router(self) -> APIRouter:
        """Return all routes."""
        router = APIRouter()
        body = {"requestBody": {"required": True, "content": PREDICT_BODY}}
        router.add_api_route("/predict", self.predict, methods=["POST"], openapi_extra=body, tags=["predictions"])
        router.add_api_route("/tasks", self.tasks, methods=["GET"], tags=["tasks"])
        router.add_api_route("/tasks", self.start_task, methods=["POST"], status_code=202, tags=["tasks"])
        finish = "/tasks/{name}/finish"
        router.add_api_route(finish, self.finish_task, methods=["POST"], status_code=202, tags=["tasks"])
        router.add_api_route("/healthz", self.health, methods=["GET"], tags=["operation"])
        router.add_api_route("/metrics", self.metrics, methods=["GET"], response_class=Response, tags=["operation"])
        router.add_api_route(
            "/events", self.events, methods=["GET"], response_class=StreamingResponse, tags=["operation"]
        )
        return router

    def close(self) -> None:
        """End the streams of events."""
        self._is_closed = True

    async def predict(
        self, request: Request, task: Annotated[str | None, Query(description="The samples' task.")] = None
    ) -> Predictions:
        """Predict samples with the weights of the latest checkpoint, without waiting for training."""
        body = await request.body()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        with self._metrics.predict_seconds.time():
            return await run_sync(self._predict, kind, body, task, limiter=self._limiter)

    def _predict(self, kind: str, body: bytes, task: str | None) -> Predictions:
        predictor = self._predictor(task)
        if kind == "application/json":
            x = samples_from_lists(_inputs_of(body), self._inputs)
        elif kind in BINARY:
            x = decode_inputs(body)
        else:
            raise HTTPException(415, f"the content type is {kind!r}; send application/json or {BINARY[0]}")
        return _as_response(predictor.predict(x, task))

    def _predictor(self, task: str | None) -> Predictor:
        """Return the latest predictor; answer 503 before there is one for the task, 404 if there will be none."""
        predictor, known = self._service.predictor, self._states()
        if task is not None and task not in known:
            raise HTTPException(404, f"there is no task {task!r}; the tasks are {list(known)}")
        if not isinstance(predictor, Predictor) or (task is not None and task not in predictor.tasks):
            raise HTTPException(503, "there is no checkpoint with this task yet; ask again later", {"Retry-After": "5"})
        return predictor

    def tasks(self) -> Status:
        """Return the state of all tasks, and of the service."""
        return self._service.status()

    def start_task(self, task: NewTask) -> NewTask:
        """Start a task between two steps; the same happens when its source announces it."""
        self._states()
        try:
            self._service.start_task(task.name, kind=task.kind, classes=task.classes)
        except TaskExistsError as error:
            raise HTTPException(409, str(error)) from None
        return task

    def finish_task(self, name: str) -> None:
        """End a task between two steps: from then on it is replayed from memory."""
        states = self._states()
        if name not in states:
            raise HTTPException(404, f"there is no task {name!r}; the tasks are {list(states)}")
        if states[name] == "finished":
            raise HTTPException(409, f"task {name!r} is finished already")
        self._service.finish_task(name)

    def _states(self) -> dict[str, str]:
        """Return the state of every task, or answer 503 while the service loads, or stands by."""
        status = self._service.status()
        if not status.running:
            raise HTTPException(503, "the service does not run yet; ask again later", {"Retry-After": "5"})
        return {task.name: task.state for task in status.tasks}

    def health(self) -> Health:
        """Return that the service is alive; it can predict once there is a checkpoint."""
        predictor = self._service.predictor
        return Health(status="ok", ready=isinstance(predictor, Predictor) and bool(predictor.tasks))

    def metrics(self) -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def events(self) -> StreamingResponse:
        """Stream ``task``, ``checkpoint`` and ``dead-letter`` events, and every second an ``update``: steps and status.

        The first update holds the history since the process started.
        """
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[str]:
        cursor = Cursor()
        while not self._is_closed:
            changes = self._history.since(cursor)
            cursor = changes.cursor
            for name, event in changes.events:
                yield _message(name, event)
            new = {"reset": changes.reset, "interval": changes.interval, "buckets": changes.buckets}
            yield _message("update", new | {"time": time.time(), "status": asdict(self._service.status())})
            await asyncio.sleep(UPDATE_SECONDS)

    async def watch_lags(self) -> None:
        """Record the lags of tasks every second, until cancelled."""
        while True:
            self._history.add_lags({task.name: task.lag_seconds for task in self._service.status().tasks})
            await asyncio.sleep(UPDATE_SECONDS)


def _message(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _inputs_of(body: bytes) -> list[Any] | dict[str, list[Any]]:
    try:
        return Samples.model_validate_json(body).inputs
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _as_response(prediction: Prediction) -> Predictions:
    if not prediction.outputs.isfinite().all():
        raise DataError("the predictions are not finite; send inputs that are finite and not too large")
    best = None
    if prediction.classes is not None:
        probabilities, indices = prediction.outputs.max(dim=1)
        named = [dict(zip(("task", "class"), prediction.classes[index], strict=True)) for index in indices.tolist()]
        best = [
            Predicted.model_validate(names | {"probability": probability})
            for names, probability in zip(named, probabilities.tolist(), strict=True)
        ]
    return Predictions(
        step=prediction.step, predictions=best, classes=prediction.classes, outputs=prediction.outputs.tolist()
    )
