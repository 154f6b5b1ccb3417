"""Engines: the shared model, the gradient matrix, backward passes. Internal: may change without notice."""

from spcl.engine.base import Engine
from spcl.engine.eager import EagerEngine
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples, Scenario, SharedModel
from spcl.engine.reduction import ReductionPlan

__all__ = ["EagerEngine", "Engine", "GradientMatrix", "ReductionPlan", "Samples", "Scenario", "SharedModel"]
