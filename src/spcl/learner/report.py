"""What one step did."""

from dataclasses import dataclass

from spcl.stability import Stability

__all__ = ["StepReport"]


@dataclass(frozen=True)
class StepReport:
    """What :meth:`Learner.step` did; the stability measures are computed when asked for, from T×T matrices.

    Attributes:
        step: which step this was, counted from 0.
        losses: the loss of every column (task, or ``"memory"``) that took part.
        weights: the weight each column's gradient got in the update; empty where the method is no weighting.
        before: stability of the columns as they were; None when the method needed no Gramian and none was asked for.
        after: stability of the adjusted columns.
        skipped: the columns left out of the step, and why.
        seconds: how long each phase took (on a GPU: until its work was handed over); ``capture``, where CUDA
            graphs were made in this step, is part of the others.
        memory_bytes: what the rehearsal memory holds now.
    """

    step: int
    losses: dict[str, float]
    weights: dict[str, float]
    before: Stability | None
    after: Stability | None
    skipped: dict[str, str]
    seconds: dict[str, float]
    memory_bytes: int
