"""The report of one step."""

from dataclasses import dataclass

from spcl.stability import Stability

__all__ = ["StepReport"]


@dataclass(frozen=True)
class StepReport:
    """Result of one :meth:`Learner.step`; stability measures are computed on access, from T×T matrices.

    Attributes:
        step: the number of the step, from 0.
        losses: the loss of every gradient (task, or ``"memory"``) that took part.
        weights: the weight of every gradient in the update; empty where the method is not a weighting.
        before: stability of the gradients; None when the method needed no Gramian and none was asked for.
        after: stability of the adjusted gradients.
        skipped: the gradients that were skipped, and why.
        seconds: the time of every phase (on a GPU: until its work was launched); ``capture``, where CUDA graphs were
            captured in this step, is part of the others.
        memory_bytes: the size of the memory's content.
    """

    step: int
    losses: dict[str, float]
    weights: dict[str, float]
    before: Stability | None
    after: Stability | None
    skipped: dict[str, str]
    seconds: dict[str, float]
    memory_bytes: int
