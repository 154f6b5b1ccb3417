r"""Methods for parallel continual learning, each in a file of its own, and every aggregator of TorchJD.

>>> from spcl.methods import METHODS, make_method
>>> make_method("der++", label_weight=1.0)    # the same as DERPP(label_weight=1.0)
DERPP(label_weight=1.0)
>>> "soro" in METHODS                         # all methods by name; `spcl methods` lists them with their costs
True

A method defines how the gradients of tasks and memory are weighted. Three choices are settings of every method and
can be combined with any: ``replay_loss``, the loss on memory; ``finished_weight``, the weight of finished classes in
the loss of new samples; ``alpha``, the weight of the orthogonality penalty. A method's state is saved with the
learner. Settings are checked when the method is made; the error for an unknown name suggests the nearest known one.
The defaults are the publication's, or those in its authors' code, unless a method says otherwise. The tables of the
SPCL paper compare these methods with code of its authors. Where that code differs from the definition of a method,
this package follows the definition and the method says so.

**Notation.** :math:`g_i` is the gradient of task i with respect to the shared parameters, :math:`\ell_i` its loss. For
MTL and PCL methods, memory adds one more gradient once it holds samples. For SCL methods :math:`g` is the mean gradient
of the current tasks, :math:`g_m` the gradient of memory, and :math:`u = g` while memory is empty. :math:`u` is the
update that the optimiser gets. Heads get the plain sum of their gradients, unless ``weigh_heads`` makes them a part of
the :math:`g_i`. :math:`C = G^\top G` is the T×T Gramian of the gradients, the columns of G. Every method but
``graddrop`` needs only C, the losses or random numbers, at a cost that does not depend on the size of the model.

**Random numbers.** ``graddrop`` has a seed of its own; ``rlw``, ``pcgrad`` and the random aggregators of TorchJD draw
from PyTorch's global generator. Checkpoints hold the state of both, so a resumed run gives the same result.

**Costs.** "Gradients held" counts the gradients of the shared parameters that exist at once, for T tasks and memory.
Measuring stability, the default of ``spcl run``, needs every gradient by itself.

**Another method** is a subclass of :class:`spcl.methods.Method` with a ``name``, ``family``, ``summary`` and
``reference``, in a file of this package or of a plug-in (:mod:`spcl.plugins`). It needs no other registration:
commands, tables and this page find it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spcl.methods.base import CURRENT, FAMILIES, MEMORY, Gradients, Loss, Method, Output, Reduction, Task, Weights
from spcl.methods.registry import METHODS, make_method, own_methods, recorded_settings

if TYPE_CHECKING:
    from spcl.methods.mdmtr import CosineHead
    from spcl.methods.reference import Cost, cost_of
    from spcl.methods.replay import REPLAY_LOSSES, LookAhead, ReplayLoss
    from spcl.methods.settings import MethodSettings
    from spcl.methods.torchjd import TorchJD, aggregators, torchjd_method

__all__ = [
    "CURRENT",
    "FAMILIES",
    "MEMORY",
    "METHODS",
    "REPLAY_LOSSES",
    "CosineHead",
    "Cost",
    "Gradients",
    "LookAhead",
    "Loss",
    "Method",
    "MethodSettings",
    "Output",
    "Reduction",
    "ReplayLoss",
    "Task",
    "TorchJD",
    "Weights",
    "aggregators",
    "cost_of",
    "make_method",
    "recorded_settings",
    "torchjd_method",
]

_NAMES = tuple(__all__)
del __all__  # __getattr__ returns it with the methods of all files, which are not imported before

_LATER = {
    "mdmtr": ("CosineHead",),
    "reference": ("Cost", "cost_of"),
    "replay": ("REPLAY_LOSSES", "LookAhead", "ReplayLoss"),
    "settings": ("MethodSettings",),
    "torchjd": ("TorchJD", "aggregators", "torchjd_method"),
}
"""The names of modules that need pydantic, which a learner does not import before it has a method."""


def __getattr__(name: str) -> Any:
    """Return a name of :data:`_LATER`, or a method of a file of this package, e.g. ``spcl.methods.SORO``."""
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    if name == "__all__":
        return __dir__()
    for method in own_methods() if not name.startswith("_") else ():
        if method.__name__ == name:
            return method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_NAMES, *(method.__name__ for method in own_methods())})
