"""What a grid asks of the pool that makes its runs."""

from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from spcl.grids.plan import Job

__all__ = ["Message", "Pool", "failure"]


@dataclass(frozen=True)
class Message:
    """A message about a job: ``step``, ``done``, ``busy``, ``interrupted``, ``failed`` or ``lost``.

    The values of ``step`` are those of :class:`spcl.grids.Running`. The values of ``failed`` are a ``reason``, its
    ``details``, whether it is a ``user_error``, one that the user has to correct, so that retrying the same run is
    useless, and whether the reason is (probably) ``out_of_memory``. A run is ``lost``, for a ``reason``, with the
    machine that made it: it did not fail, and is made again.
    """

    job: Job
    event: str
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, sent: dict[str, Any]) -> Self:
        """Return what a worker sent, its values with the event among them, as a message about its job."""
        return cls(job, sent["event"], {name: value for name, value in sent.items() if name != "event"})


def failure(reason: str, details: str = "", user_error: bool = False, out_of_memory: bool = False) -> dict[str, Any]:
    """Return the values of ``failed``, with the event itself, as workers send it."""
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

    def next_message(self, timeout: float) -> Message | None:
        """Return the next message about a job, or None if there is none within ``timeout`` seconds."""
        ...

    def close(self) -> None:
        """Let every run save itself, and wait for it."""
        ...
