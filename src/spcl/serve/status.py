"""The state of a service and of its tasks, for everyone who asks."""

from dataclasses import dataclass
from typing import Literal

from spcl.sources import Kind

__all__ = ["Status", "TaskState", "TaskStatus"]

TaskState = Literal["waiting", "running", "silent", "failed", "finished"]


@dataclass(frozen=True)
class TaskStatus:
    """The state of a task.

    Attributes:
        name: its name.
        kind: what its targets are; None while it is not known.
        classes: the number of its classes, labels or numbers; None while it is not known.
        state: waiting to be announced, running, silent (running, without batches for long), failed (its source cannot
            be read, now or for good) or finished.
        batches: how many batches were learned.
        samples: how many samples were in them.
        lag_seconds: how long the next batch has been awaited; 0 while batches are queued.
        backlog: how many messages wait in the hub.
        last_seen: when the last message came (``time.time()``); None before the first of this process.
        dead_letters: how many messages could not be learned.
        late: how many messages were not learned because the task had ended; known when the hub deletes its stream.
    """

    name: str
    kind: Kind | None
    classes: int | None
    state: TaskState
    batches: int
    samples: int
    lag_seconds: float
    backlog: int
    last_seen: float | None
    dead_letters: int
    late: int


@dataclass(frozen=True)
class Status:
    """The state of a service.

    Attributes:
        tasks: all tasks ever seen, in that order.
        steps: of the learner, since it began.
        samples: that were learned, since it began.
        memory_samples: samples in memory.
        memory_bytes: size of the memory's content.
        checkpoint_time: of the last checkpoint (``time.time()``); None before the first.
        checkpoint_age: seconds since then.
        uptime: seconds since the service began to run; 0 before.
        running: whether it runs, or else loads its state or stands by.
    """

    tasks: list[TaskStatus]
    steps: int
    samples: int
    memory_samples: int
    memory_bytes: int
    checkpoint_time: float | None
    checkpoint_age: float | None
    uptime: float
    running: bool
