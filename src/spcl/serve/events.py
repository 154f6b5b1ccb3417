"""What a service reports while it runs."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["CheckpointEvent", "DeadLetterEvent", "Event", "StepEvent", "TaskEvent"]


@dataclass(frozen=True)
class StepEvent:
    """One step of the learner.

    Attributes:
        time: when it ended (``time.time()``).
        step: its number, from 0.
        samples: the new samples of every task in it.
        losses: the loss of every gradient, those of the tasks and of ``"memory"``.
        accuracies: prequential accuracy, from 0 to 1, of the classifiers that were tested on their batch before they
            were trained on it; empty in most moments where testing would take too much time.
        kappa_before: condition number κ of the gradients; NaN where all of them are zero, None where the method
            computed none, and in most moments where it would take too much time.
        kappa_after: κ of the adjusted gradients.
        skipped: the gradients that were not finite.
        seconds: how long the step took.
    """

    time: float
    step: int
    samples: dict[str, int]
    losses: dict[str, float]
    accuracies: dict[str, float]
    kappa_before: float | None
    kappa_after: float | None
    skipped: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class TaskEvent:
    """A task that started or ended, got messages after its end, or whose source cannot be read, or can again."""

    time: float
    task: str
    kind: Literal["started", "ended", "late", "failed", "recovered"]
    text: str


@dataclass(frozen=True)
class CheckpointEvent:
    """A checkpoint that was saved after so many steps, how long that took, and its size."""

    time: float
    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class DeadLetterEvent:
    """A message that cannot be learned, its position in the task's stream, and the reason."""

    time: float
    task: str
    position: str
    reason: str


Event = StepEvent | TaskEvent | CheckpointEvent | DeadLetterEvent
