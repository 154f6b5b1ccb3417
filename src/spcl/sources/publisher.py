"""Publishing batches to a hub."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from secrets import token_hex
from threading import Lock
from typing import Literal

from spcl._util.registry import Named
from spcl.batches import ArrayLike, InputsLike
from spcl.errors import SpclError
from spcl.sources.base import Hub, HubError, check_task_name
from spcl.sources.wire import PUBLISHER, Announcement, announce, encode_batch, encode_end, encode_start, stamped
from spcl.tasks import Kind

POLL_SECONDS = 0.02


class Publisher:
    """Publishes batches of any number of tasks.

    Several publishers may publish to one task, and one that starts again continues the stream.

    A batch whose publishing raised an error may have been stored or not: publish it again, and it is stored once. A
    program that may be killed can have the same with a ``name`` and numbers of its own, such as line numbers of a log.
    May be used by several threads.

    Args:
        hub: where to, e.g. a :class:`FolderHub`.
        capacity: how many messages of a task may be stored in the hub. Messages are deleted once the learner's kept
            checkpoints hold them.
        when_full: ``"block"`` waits for space; ``"trim"`` deletes the oldest messages, learned or not.
        patience: seconds to wait for space, also while the hub cannot be asked whether there is some; None waits
            without limit. How long sending a message is tried again is the patience of the hub, such as a
            :class:`RedisHub`.
        name: of this publisher, if it numbers its batches: letters, digits, "_", "-" and ".". A batch whose number is
            not above the number of the last batch of a publisher of this name in the task is dropped.

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
        name: str | None = None,
    ) -> None:
        if capacity < 2 or when_full not in ("block", "trim"):
            raise SpclError(
                f"capacity is {capacity} and when_full {when_full!r}; give at least 2 messages, and 'block' or 'trim'"
            )
        if name is not None and not PUBLISHER.fullmatch(name):
            raise SpclError(
                f"a publisher cannot be named {name!r:.120}; take up to 100 of a to z, A to Z, 0 to 9, '_', '-' and '.'"
            )
        self._hub = hub
        self._is_numbered = name is not None
        self._name = name or token_hex(8)
        self._numbers: dict[str, int] = defaultdict(int)
        self._unanswered: dict[str, bytes] = {}  # digests of batches that may have been stored
        self._locks: dict[str, Lock] = defaultdict(Lock)  # numbers must arrive in their order
        self._capacity = capacity
        self._when_full = when_full
        self._patience = patience
        self._announced: dict[str, Announcement] = {}

    def start(
        self,
        name: str,
        *,
        classes: int | Sequence[str] | None = None,
        kind: Kind = "classification",
        task: str | None = None,
        encoder: Named | None = None,
    ) -> None:
        """Announce a source, also one that has ended and returns.

        Args:
            name: its name.
            classes: the number or names of the classes (or outputs) of its task.
            kind: what the targets of its task are.
            task: the name of its task, which other sources may answer, too; by default it has one of its own name.
            encoder: the name of an encoder of its own in front of the network, such as ``"affine"``, or its name and
                options; by default what the service's settings say.
        """
        announced = announce(check_task_name(name), kind, classes, task, encoder)
        self._hub.reopen(name)
        self._append(name, encode_start(announced))
        self._announced[name] = announced

    def publish(self, task: str, x: InputsLike, y: ArrayLike, number: int | None = None) -> None:
        """Publish a batch, with a number if the publisher has a name."""
        if (number is not None) != self._is_numbered or (number is not None and not 0 <= number < 10**18):
            raise SpclError(
                f"the number of the batch is {number}; give a number from 0 to 10¹⁸ - 1 if the publisher has a name, "
                f"and else none"
            )
        data = encode_batch((x, y), self._announced.get(task))
        with self._locks[check_task_name(task)]:
            if number is not None:
                self._append(task, stamped(data, self._name, number))
            else:
                self._append_once(task, data)

    def end(self, task: str) -> None:
        """Announce that no more batches of the task will come."""
        self._append(task, encode_end())

    def _append_once(self, task: str, data: bytes) -> None:
        """Append a batch under its own number: the last one again if it is the batch whose answer was lost."""
        unanswered = self._unanswered.get(task)
        if unanswered is None or unanswered != sha256(data).digest():
            self._numbers[task] += 1
        try:
            self._append(task, stamped(data, self._name, self._numbers[task]))
        except BaseException:
            self._unanswered[task] = sha256(data).digest()
            raise
        self._unanswered.pop(task, None)

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
