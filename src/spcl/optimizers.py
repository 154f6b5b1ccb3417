"""Optimisers by name: those of torch.optim in lower case, and those of plug-ins."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spcl.registry import Registry

__all__ = ["OPTIMIZERS"]

OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry("optimizer", Optimizer, positional=1, keywords=("lr",))
"""Functions ``make(parameters, lr=…, **options)`` of an optimiser: ``adam``, ``adamw``, ``sgd`` and the others of
torch.optim whose step needs no closure.

>>> weight = nn.Parameter(torch.zeros(1))
>>> OPTIMIZERS.make({"name": "sgd", "momentum": 0.9}, [weight], lr=0.1).defaults["momentum"]
0.9
"""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
NEEDS_CLOSURE = (torch.optim.LBFGS,)


def _factory(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    parameters_of_kind = inspect.signature(kind).parameters

    def make(parameters: list[nn.Parameter], **options: Any) -> Optimizer:
        fast: dict[str, Any] = {"fused": True} if kind in FUSED else {}
        if "capturable" in parameters_of_kind:
            fast["capturable"] = bool(parameters) and parameters[0].is_cuda
        return kind(parameters, **fast | options)

    make.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
    make.__doc__ = f"``torch.optim.{kind.__name__}``."
    make.__qualname__ = kind.__name__
    return make


for _kind in vars(torch.optim).values():
    if isinstance(_kind, type) and issubclass(_kind, Optimizer) and _kind not in (Optimizer, *NEEDS_CLOSURE):
        OPTIMIZERS.register(_kind.__name__.lower())(_factory(_kind))
