"""Publishing batches to a hub."""

import math
import time
from collections.abc import Sequence
from typing import Literal

from spcl.batches import ArrayLike, InputsLike
from spcl.errors import SpclError
from spcl.sources.base import HubError
from spcl.sources.hub import Hub, check_task_name
from spcl.sources.schema import Kind, Schema
from spcl.sources.wire import encode_batch, encode_end, encode_start

__all__ = ["Publisher"]

POLL_SECONDS = 0.02


class Publisher:
    """Publishes batches of any number of tasks.

    Several publishers may publish to one task. One that starts again goes on after what was published before.

    Args:
        hub: where to, e.g. a :class:`FolderHub`.
        capacity: how many messages of a task the hub stores. Messages are deleted once they are in the learner's last
            two checkpoints.
        when_full: ``"block"`` waits for space; ``"trim"`` deletes the oldest messages, learned or not.
        patience: seconds to wait for space, also while the hub cannot be asked whether there is some; None waits
            without limit. How long sending a message is tried again is the patience of the hub, such as a
            :class:`RedisHub`.

    >>> import tempfile, torch
    >>> from spcl.sources import FolderHub
    >>> hub = FolderHub(tempfile.mkdtemp())
    >>> publisher = Publisher(hub)
    >>> publisher.start("camera", classes=5)
    >>> publisher.publish("camera", torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))
    >>> publisher.end("camera")
    >>> hub.tasks(), hub.backlog("camera", after=None)
    (['camera'], 3)
    """

    def __init__(
        self,
        hub: Hub,
        *,
        capacity: int = 10_000,
        when_full: Literal["block", "trim"] = "block",
        patience: float | None = None,
    ) -> None:
        if capacity < 2 or when_full not in ("block", "trim"):
            raise SpclError(
                f"capacity is {capacity} and when_full {when_full!r}; give at least 2 messages, and 'block' or 'trim'"
            )
        self._hub = hub
        self._capacity = capacity
        self._when_full = when_full
        self._patience = patience
        self._schemas: dict[str, Schema] = {}

    def start(self, task: str, *, classes: int | Sequence[str] | None = None, kind: Kind = "classification") -> None:
        """Announce a task: its kind, and the number or names of its classes (or outputs)."""
        schema = Schema.of(kind, classes)
        self._append(task, encode_start(schema))
        self._schemas[task] = schema

    def publish(self, task: str, x: InputsLike, y: ArrayLike) -> None:
        """Publish a batch."""
        self._append(task, encode_batch((x, y), self._schemas.get(task)))

    def end(self, task: str) -> None:
        """Announce that no more batches of the task will come."""
        self._append(task, encode_end())

    def _append(self, task: str, data: bytes) -> None:
        check_task_name(task)
        if self._when_full == "trim":
            self._hub.append(task, data, self._capacity)
            return
        deadline = math.inf if self._patience is None else time.monotonic() + self._patience
        while not self._has_space(task, deadline):
            if time.monotonic() > deadline:
                raise HubError(
                    f"the stream of task {task!r} has been full with {self._capacity} messages for {self._patience} s; "
                    f"is it being learned?"
                )
            time.sleep(POLL_SECONDS)
        self._hub.append(task, data)

    def _has_space(self, task: str, deadline: float) -> bool:
        try:
            return self._hub.backlog(task, None) < self._capacity
        except OSError:
            if time.monotonic() > deadline:
                raise
            return False
