"""Options of training that may be changed between steps."""

from dataclasses import dataclass

__all__ = ["StepOptions"]


@dataclass
class StepOptions:
    """What a learner does in a step beyond its method.

    Attributes:
        memory_batch: how many samples to replay; None replays as many as the step's largest batch has.
        measure_stability: whether every gradient is kept separately, so that their stability can be measured.
    """

    memory_batch: int | None
    measure_stability: bool
