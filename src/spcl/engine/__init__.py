"""Engines: the shared model, the gradient matrix, backward passes. Internal: may change without notice."""

from spcl.engine.base import Engine
from spcl.engine.eager import EagerEngine
from spcl.engine.model import Samples, SharedModel
from spcl.engine.rows import GradientMatrix, ReductionPlan

__all__ = ["EagerEngine", "Engine", "GradientMatrix", "ReductionPlan", "Samples", "SharedModel"]
