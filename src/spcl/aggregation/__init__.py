"""Weightings, which compute one weight per task from the Gramian of the tasks' gradients."""

from spcl.aggregation.agem import AGEMWeighting
from spcl.aggregation.condition import ConditionSolution, solve_condition
from spcl.aggregation.emgd import emgd_weights
from spcl.aggregation.gramians import gramian, host_gramian
from spcl.aggregation.maxdo import MaxDOWeighting
from spcl.aggregation.maxdo_descent import maxdo_descent_weights
from spcl.aggregation.min_norm import min_norm_weights
from spcl.aggregation.scale_free import NormScale, solve_scale_free
from spcl.aggregation.soro import SORO, SOROWeighting
from spcl.aggregation.soro_settings import SOROPresets, SOROSettings
from spcl.aggregation.soro_solver import SOROSolution, solve_soro

__all__ = [
    "SORO",
    "AGEMWeighting",
    "ConditionSolution",
    "MaxDOWeighting",
    "NormScale",
    "SOROPresets",
    "SOROSettings",
    "SOROSolution",
    "SOROWeighting",
    "emgd_weights",
    "gramian",
    "host_gramian",
    "maxdo_descent_weights",
    "min_norm_weights",
    "solve_condition",
    "solve_scale_free",
    "solve_soro",
]
