"""Methods for parallel continual learning, each in a file of its own."""

from spcl.methods.agem import AGEM
from spcl.methods.base import (
    CURRENT,
    MEMORY,
    Gradients,
    LookAhead,
    Loss,
    Method,
    MethodSettings,
    Output,
    Reduction,
    Task,
    Weights,
)
from spcl.methods.costs import Cost, cost_of
from spcl.methods.derpp import DERPP
from spcl.methods.dwa import DWA
from spcl.methods.emgd import EMGD
from spcl.methods.er import ER
from spcl.methods.gmed import GMED
from spcl.methods.graddrop import GradDrop
from spcl.methods.maxdo import MaxDO
from spcl.methods.mdmtr import MDMTR, CosineHead
from spcl.methods.mega import MEGA
from spcl.methods.mgda import MGDA
from spcl.methods.pcgrad import PCGrad
from spcl.methods.registry import METHODS, make_method
from spcl.methods.rlw import RLW
from spcl.methods.soro import SORO, SORODBT
from spcl.methods.torchjd import TorchJD, aggregators, torchjd_method

__all__ = [
    "AGEM",
    "CURRENT",
    "DERPP",
    "DWA",
    "EMGD",
    "ER",
    "GMED",
    "MDMTR",
    "MEGA",
    "MEMORY",
    "METHODS",
    "MGDA",
    "RLW",
    "SORO",
    "SORODBT",
    "CosineHead",
    "Cost",
    "GradDrop",
    "Gradients",
    "LookAhead",
    "Loss",
    "MaxDO",
    "Method",
    "MethodSettings",
    "Output",
    "PCGrad",
    "Reduction",
    "Task",
    "TorchJD",
    "Weights",
    "aggregators",
    "cost_of",
    "make_method",
    "torchjd_method",
]
