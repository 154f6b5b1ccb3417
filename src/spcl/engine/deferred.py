"""Tensors that are computed when they are used, because a function that follows can be computed with them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from spcl.engine.segments import UnsupportedError

__all__ = ["IN_PLACE", "RELUS", "DeferredTensors"]

IN_PLACE = {torch.relu_, Tensor.relu_}
RELUS = {functional.relu, torch.relu, Tensor.relu} | IN_PLACE
"""Functions that a deferred tensor is computed together with."""


class Compute(Protocol):
    """Computes a tensor, with or without ReLU."""

    def __call__(self, *, relu: bool) -> Tensor:
        """Return the tensor."""
        ...


class DeferredTensors:
    """Placeholders of tensors, within a mode that sees every function call.

    A tensor whose first use is ReLU is computed with it; any other use computes it by itself.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Tensor, Compute]] = {}
        self._known: dict[int, tuple[Tensor, Tensor | None]] = {}

    def add(self, like: Tensor, compute: Compute) -> Tensor:
        """Return the placeholder of a tensor."""
        placeholder = like.new_empty(0)
        self._waiting[id(placeholder)] = placeholder, compute
        return placeholder

    @property
    def is_empty(self) -> bool:
        """Whether there are no placeholders."""
        return not (self._waiting or self._known)

    def is_fresh(self, values: Sequence[Any]) -> bool:
        """Return whether the only value is a placeholder that nothing has used."""
        return len(values) == 1 and id(values[0]) in self._waiting

    def relu(self, placeholder: Tensor, in_place: bool) -> Tensor:
        """Return ReLU of the tensor, which is not known afterwards unless ReLU has replaced it."""
        _, compute = self._waiting.pop(id(placeholder))
        result = compute(relu=True)
        self._known[id(placeholder)] = placeholder, result if in_place else None
        return result

    def resolved(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return arguments with tensors in place of placeholders."""
        if self.is_empty:
            return args, dict(kwargs)
        return [self._value(each) for each in args], {name: self._value(each) for name, each in kwargs.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self._value, value))
        if id(value) in self._waiting:
            placeholder, compute = self._waiting.pop(id(value))
            self._known[id(value)] = placeholder, compute(relu=False)
        if id(value) not in self._known:
            return value
        known = self._known[id(value)][1]
        if known is None:
            raise UnsupportedError("the output of a batch-norm layer is used both with ReLU and without")
        return known
