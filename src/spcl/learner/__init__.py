"""The online engine: one model, any number of sources, tasks that come and go, no known end."""

from spcl.learner.learner import Batch, Learner
from spcl.learner.method import CURRENT, Columns, Fold, LookAhead, Method, MethodSettings, Weights
from spcl.learner.model import Scenario
from spcl.learner.report import StepReport
from spcl.learner.tasks import MEMORY, Loss, Output, Task

__all__ = [
    "CURRENT",
    "MEMORY",
    "Batch",
    "Columns",
    "Fold",
    "Learner",
    "LookAhead",
    "Loss",
    "Method",
    "MethodSettings",
    "Output",
    "Scenario",
    "StepReport",
    "Task",
    "Weights",
]
