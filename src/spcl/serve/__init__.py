"""A service that trains one learner on live sources, without end."""

from spcl.serve.events import (
    CheckpointEvent,
    DeadLetterEvent,
    Event,
    SaveFailedEvent,
    Status,
    StepEvent,
    TaskEvent,
    TaskStatus,
)
from spcl.serve.service import Service
from spcl.serve.settings import ServeSettings, load_serve_settings

__all__ = [
    "CheckpointEvent",
    "DeadLetterEvent",
    "Event",
    "SaveFailedEvent",
    "ServeSettings",
    "Service",
    "Status",
    "StepEvent",
    "TaskEvent",
    "TaskStatus",
    "load_serve_settings",
]
