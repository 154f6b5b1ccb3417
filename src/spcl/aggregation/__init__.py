"""Weightings, which compute one weight per task from the Gramian of the tasks' gradients."""

from spcl.aggregation.agem import AGEMWeighting
from spcl.aggregation.emgd import emgd_weights
from spcl.aggregation.gramians import gramian, host_gramian
from spcl.aggregation.maxdo import MaxDOWeighting
from spcl.aggregation.min_norm import min_norm_weights
from spcl.aggregation.soro import RELEASED, SORO, SOROSettings, SOROSolution, SOROWeighting, solve_soro

__all__ = [
    "RELEASED",
    "SORO",
    "AGEMWeighting",
    "MaxDOWeighting",
    "SOROSettings",
    "SOROSolution",
    "SOROWeighting",
    "emgd_weights",
    "gramian",
    "host_gramian",
    "min_norm_weights",
    "solve_soro",
]
