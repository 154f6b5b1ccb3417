"""Methods for parallel continual learning.

Every file of this package that defines a subclass of :class:`Method` with a ``name`` adds a method, and so does every
entry point of the group ``spcl.methods`` in another installed package; :data:`METHODS` holds them by name. The classes
in the files can be imported from here::

    from spcl.methods import SORO, Method, make_method
"""

from typing import Any

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
from spcl.methods.registry import METHODS, make_method, method_modules
from spcl.methods.torchjd import TorchJD, aggregators, torchjd_method

__all__ = [
    "CURRENT",
    "MEMORY",
    "METHODS",
    "Cost",
    "Gradients",
    "LookAhead",
    "Loss",
    "Method",
    "MethodSettings",
    "Output",
    "Reduction",
    "Task",
    "TorchJD",
    "Weights",
    "aggregators",
    "cost_of",
    "make_method",
    "torchjd_method",
]
__all__ += [name for module in method_modules() for name in vars(module).get("__all__", ())]


def __getattr__(name: str) -> Any:
    """Return a class of a file of this package, e.g. ``spcl.methods.SORO``."""
    for module in method_modules():
        if name in vars(module).get("__all__", ()):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
