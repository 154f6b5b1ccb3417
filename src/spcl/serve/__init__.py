"""A service that trains one learner on live sources, without end."""

from spcl.serve.events import CheckpointEvent, DeadLetterEvent, Event, StepEvent, TaskEvent
from spcl.serve.service import Service
from spcl.serve.settings import ServeSettings, load_serve_settings
from spcl.serve.status import Status, TaskStatus

__all__ = [
    "CheckpointEvent",
    "DeadLetterEvent",
    "Event",
    "ServeSettings",
    "Service",
    "Status",
    "StepEvent",
    "TaskEvent",
    "TaskStatus",
    "load_serve_settings",
]
