"""What a grid and the pool that makes its runs say to each other."""

from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from spcl.grids.plan import Job


@dataclass(frozen=True)
class JobMessage:
    """A message about a job: ``step``, ``done``, ``busy``, ``interrupted``, ``failed`` or ``lost``.

    The values of ``step`` are the fields of :class:`~spcl.grids.Running`; of ``done`` ``summary`` and ``skipped``, see
    :meth:`~spcl.grids.GridView.finished`; of ``failed`` the arguments of :func:`failure`. A run is ``busy`` while
    another process makes it, and ``lost``, for a ``reason``, when the machine that made it is gone: the run did not
    fail, and is made again.
    """

    job: Job
    event: str
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, sent: dict[str, Any]) -> Self:
        """Return what a worker sent, its values with the event among them, as a message about its job."""
        return cls(job, sent["event"], {name: value for name, value in sent.items() if name != "event"})


def failure(reason: str, details: str = "", user_error: bool = False, out_of_memory: bool = False) -> dict[str, Any]:
    """Return a ``failed`` message as workers send it.

    Args:
        reason: why the run failed, in a sentence.
        details: a traceback, or what the process printed.
        user_error: whether the user has to correct something, so that a retry is useless.
        out_of_memory: whether memory was (probably) exhausted.
    """
    values = {"reason": reason, "details": details, "user_error": user_error, "out_of_memory": out_of_memory}
    return {"event": "failed", **values}


class Pool(Protocol):
    """Makes runs side by side, on this machine or on others; leaving the ``with`` block closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def has_room(self) -> bool:
        """Return whether another job can start now."""
        ...

    def start(self, job: Job) -> None:
        """Start the job."""
        ...

    def next_message(self, timeout: float) -> JobMessage | None:
        """Return the next message about a job, or None if there is none within ``timeout`` seconds."""
        ...

    def close(self) -> None:
        """Let every run save itself, and wait for it."""
        ...
