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
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from spcl.errors import SpclError
from spcl.serve.history import Cursor, History
from spcl.serve.metrics import CONTENT_TYPE, Metrics
from spcl.serve.predictor import Prediction, Predictor
from spcl.serve.samples import check_samples, samples_from_lists
from spcl.serve.service import Service, Status

__all__ = ["Api", "Health", "NewTask", "Predicted", "Predictions"]

UPDATE_SECONDS = 1.0
"""How often readers of events get what is new."""

PREDICTIONS_AT_ONCE = 4
"""Predictions that are computed at the same time; more would only take the processor from each other."""


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
    classes: int | list[str] | None = Field(None, description="The number of classes, or their names.")


class Health(BaseModel):
    """Whether the service is alive, and whether it can predict yet."""

    status: str
    ready: bool
