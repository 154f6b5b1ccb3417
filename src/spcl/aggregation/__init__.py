"""Weightings: the Gramian of the tasks' gradients (and their losses) in, one weight per task out."""

from spcl.aggregation.gramians import gramian, host_gramian
from spcl.aggregation.soro import RELEASED, SORO, SOROSettings, SOROSolution, SOROWeighting, solve_soro

__all__ = ["RELEASED", "SORO", "SOROSettings", "SOROSolution", "SOROWeighting", "gramian", "host_gramian", "solve_soro"]
