"""Stable parallel continual learning: one model, many data sources, tasks that come and go.

The names below are imported when they are first used, so that ``import spcl`` does not wait for PyTorch. Everything
else is in the packages: :mod:`spcl.methods`, :mod:`spcl.memory`, :mod:`spcl.streams`, :mod:`spcl.runs` and more.
"""

from importlib import import_module

TYPE_CHECKING = False  # typing has the same name, but takes longer to import than all the rest here
if TYPE_CHECKING:
    from spcl.distributed import join_world
    from spcl.errors import SpclError
    from spcl.learner import Learner
    from spcl.memory import BalancedCoreset, Reservoir
    from spcl.methods import SORO, SPCL
    from spcl.runs import load_run
    from spcl.runs.run import run
    from spcl.streams import LiveStream

    __version__: str

__all__ = [
    "SORO",
    "SPCL",
    "BalancedCoreset",
    "Learner",
    "LiveStream",
    "Reservoir",
    "SpclError",
    "__version__",
    "join_world",
    "load_run",
    "run",
]

_HOMES = {
    "BalancedCoreset": "spcl.memory",
    "Learner": "spcl.learner",
    "LiveStream": "spcl.streams",
    "Reservoir": "spcl.memory",
    "SORO": "spcl.methods",
    "SPCL": "spcl.methods",
    "SpclError": "spcl.errors",
    "join_world": "spcl.distributed",
    "load_run": "spcl.runs",
    "run": "spcl.runs.run",
}
"""The module of each name."""


if not TYPE_CHECKING:  # for a type checker these names are all there are

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value = import_module("importlib.metadata").version("spcl")
        elif name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module 'spcl' has no attribute {name!r}; its packages are imported by their names")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
