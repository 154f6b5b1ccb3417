"""A service that trains one learner on live sources, without end."""

from spcl.serve.events import CheckpointEvent, DeadLetterEvent, Event, StepEvent, TaskEvent
from spcl.serve.settings import ServeSettings, load_serve_settings

__all__ = [
    "CheckpointEvent",
    "DeadLetterEvent",
    "Event",
    "ServeSettings",
    "StepEvent",
    "TaskEvent",
    "load_serve_settings",
]
