"""The online learner: one model, any number of sources, tasks that come and go, no known end."""

from spcl.engine.model import Scenario
from spcl.learner.learner import Batch, Learner
from spcl.learner.report import StepReport

__all__ = ["Batch", "Learner", "Scenario", "StepReport"]
