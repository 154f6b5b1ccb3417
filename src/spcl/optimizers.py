"""Optimisers by name: PyTorch's, in lower case, and optimisers of plug-ins."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spcl._util.registry import Registry

__all__ = ["OPTIMIZERS"]

OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry("optimizer", Optimizer, positional=1, keywords=("lr",))
"""Functions ``make(parameters, lr=…, **options)`` that return an optimiser, by name.

>>> weight = nn.Parameter(torch.zeros(1))
>>> OPTIMIZERS.make({"name": "sgd", "momentum": 0.9}, [weight], lr=0.1).defaults["momentum"]
0.9
"""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
OTHERS = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
)
IMPLEMENTATION = ("capturable", "differentiable", "foreach", "fused", "maximize")
"""Parameters that choose an implementation, not a result, and therefore are no options."""


def _factory(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a function that makes the optimiser, in the fastest implementation for its parameters' device."""
    signature = inspect.signature(kind)

    def make(parameters: list[nn.Parameter], **options: Any) -> Optimizer:
        fast: dict[str, Any] = {"fused": True} if kind in FUSED else {}
        if "capturable" in signature.parameters:
            fast["capturable"] = bool(parameters) and parameters[0].is_cuda
        pairs = {name: tuple(map(float, each)) for name, each in options.items() if isinstance(each, list | tuple)}
        return kind(parameters, **fast, **options | pairs)  # floats, because PyTorch refuses integer betas

    shown = [each for name, each in signature.parameters.items() if name not in IMPLEMENTATION]
    make.__annotations__ = {each.name: _type(each.default) for each in shown if each.default is not each.empty}
    make.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    make.__doc__ = f"``torch.optim.{kind.__name__}``."
    make.__qualname__ = kind.__name__
    return make


def _type(default: Any) -> Any:
    """Return the type of an option from its default, because PyTorch's annotations allow tensors, too.

    >>> _type(0), _type((0.9, 0.999)), _type(False)
    (<class 'float'>, tuple[float, float], <class 'bool'>)
    """
    if isinstance(default, tuple):
        return tuple[tuple(map(_type, default))]  # type: ignore[misc]
    return bool if isinstance(default, bool) else float


for _kind in (*FUSED, *OTHERS):
    OPTIMIZERS.register(_kind.__name__.lower())(_factory(_kind))
