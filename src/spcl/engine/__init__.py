"""What computes a step: the shared model, the gradient matrix, backward passes, the update."""

from spcl.engine.engine import EagerEngine, Engine
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples, Scenario, SharedModel
from spcl.engine.reduction import ReductionPlan

__all__ = ["EagerEngine", "Engine", "GradientMatrix", "ReductionPlan", "Samples", "Scenario", "SharedModel"]
