"""The online learner: one model, any number of sources, tasks that come and go, no known end."""

from spcl.batches import Batch, BatchLike
from spcl.learner.fit import MomentLike
from spcl.learner.learner import Learner
from spcl.learner.step import StepReport
from spcl.options import Scenario

__all__ = ["Batch", "BatchLike", "Learner", "MomentLike", "Scenario", "StepReport"]
