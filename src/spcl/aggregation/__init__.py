"""Weights of gradients from their Gramian: solvers in T×T matrices, and SORO, A-GEM and MaxDO as parts of TorchJD.

The classes for TorchJD are :class:`SORO`, :class:`SOROWeighting`, :class:`AGEMWeighting` and :class:`MaxDOWeighting`.
All names but the Gramian are imported on first use, because some need TorchJD or pydantic, which import slowly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spcl.aggregation.gramians import gramian, host_gramian

if TYPE_CHECKING:
    from spcl.aggregation.agem import agem_weights
    from spcl.aggregation.condition import ConditionSolution, NormScale, solve_condition, solve_scale_free
    from spcl.aggregation.maxdo import maxdo_descent_weights, maxdo_weights
    from spcl.aggregation.min_norm import emgd_weights, min_norm_weights
    from spcl.aggregation.soro import SOROPresets, SOROSettings, SOROSolution, solve_soro
    from spcl.aggregation.torchjd import SORO, AGEMWeighting, MaxDOWeighting, SOROWeighting

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
    "agem_weights",
    "emgd_weights",
    "gramian",
    "host_gramian",
    "maxdo_descent_weights",
    "maxdo_weights",
    "min_norm_weights",
    "solve_condition",
    "solve_scale_free",
    "solve_soro",
]


_LATER = {
    "agem": ("agem_weights",),
    "condition": ("ConditionSolution", "NormScale", "solve_condition", "solve_scale_free"),
    "maxdo": ("maxdo_descent_weights", "maxdo_weights"),
    "min_norm": ("emgd_weights", "min_norm_weights"),
    "soro": ("SOROPresets", "SOROSettings", "SOROSolution", "solve_soro"),
    "torchjd": ("SORO", "AGEMWeighting", "MaxDOWeighting", "SOROWeighting"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
