"""The online learner: one model, any number of sources, tasks that come and go, no known end."""

from spcl.batches import Batch, BatchLike
from spcl.engine.model import Scenario
from spcl.learner.fitting import MomentLike
from spcl.learner.learner import Learner
from spcl.learner.report import StepReport

__all__ = ["Batch", "BatchLike", "Learner", "MomentLike", "Scenario", "StepReport"]
