r"""Methods for parallel continual learning, each in a file of its own, and every aggregator of TorchJD.

>>> from spcl.methods import METHODS, make_method
>>> make_method("der++", label_weight=1.0)    # the same as DERPP(label_weight=1.0)
DERPP(label_weight=1.0)
>>> "soro" in METHODS                         # all methods by name; `spcl methods` lists them with their costs
True

A method defines how the gradients of tasks and memory are weighted. The loss on memory is a setting of every method,
``replay_loss``, and so are the weight of finished classes in that of new samples, ``finished_weight``, and the penalty
``alpha``, so that any can be combined. A method's state is saved with the learner. Settings are checked when the method
is made; the error for an unknown name suggests the nearest known one. The defaults are those of the publication, or of
the code its authors published, unless a method says otherwise. The tables of the SPCL paper compare these methods by
code of its authors; where that code differs from the definition of a method, the definition is used here and the method
says so.

**Notation.** :math:`g_i` is the gradient of task i with respect to the shared parameters, :math:`\ell_i` its loss. For
MTL and PCL methods memory, once it holds samples, is one more gradient among the T. For SCL methods :math:`g` is the
mean gradient of the current tasks, :math:`g_m` that of memory, and :math:`u = g` while memory is empty. :math:`u` is
the update that the optimiser gets; heads get the plain sum of their gradients, unless ``weigh_heads`` makes them a part
of the :math:`g_i`. :math:`C = G^\top G` is the T×T
Gramian of the gradients, the columns of G. Every method but ``graddrop`` is computed from it, from the losses or from
random numbers alone, at a cost that does not depend on the size of the model.

**Random numbers.** ``graddrop`` has a seed of its own; ``rlw``, ``pcgrad`` and the random aggregators of TorchJD draw
from PyTorch's global generator. Checkpoints hold the state of both, so a resumed run gives the same result.

**Costs.** The gradients held are those of the shared parameters that exist at once, for T tasks and memory. Measuring
stability, the default of ``spcl run``, takes every gradient by itself.

**Another method** is a subclass of :class:`spcl.methods.Method` with a ``name``, ``family``, ``summary`` and
``reference``, in a file of this package or of a plug-in (:mod:`spcl.plugins`). It needs no other registration:
commands, tables and this page find it.
"""

from typing import Any

from spcl.methods.base import (
    CURRENT,
    FAMILIES,
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
from spcl.methods.registry import METHODS, make_method, method_modules, recorded_settings
from spcl.methods.replay import REPLAY_LOSSES, ReplayLoss
from spcl.methods.torchjd import TorchJD, aggregators, torchjd_method

__all__ = [
    "CURRENT",
    "FAMILIES",
    "MEMORY",
    "METHODS",
    "REPLAY_LOSSES",
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


def __getattr__(name: str) -> Any:
    """Return a class of a file of this package, e.g. ``spcl.methods.SORO``, also while another file imports it."""
    for module in method_modules():
        if name in vars(module).get("__all__", ()):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ += [name for module in method_modules() for name in vars(module).get("__all__", ())]
