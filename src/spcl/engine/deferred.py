"""Tensors that are computed when they are used, because functions that follow can be computed with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spcl.engine.segments import UnsupportedError

__all__ = ["FOLLOWING", "NOTHING", "DeferredTensors", "Followers"]


@dataclass(frozen=True, eq=False)
class Followers:
    """What is computed together with a tensor, in this order.

    Attributes:
        addend: a tensor of the same shape that is added.
        relu: whether negative numbers become zero.
        pool: whether the largest of every 2×2 pixels is kept.
    """

    addend: Tensor | None = None
    relu: bool = False
    pool: bool = False


NOTHING = Followers()
"""A tensor by itself."""

Compute = Callable[[Followers], Tensor]
"""Computes a tensor together with what follows."""

IN_PLACE = {torch.relu_, Tensor.relu_, Tensor.__iadd__, Tensor.add_}
RELUS = {functional.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_}
ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__}
POOLS = {functional.max_pool2d}
FOLLOWING = RELUS | ADDITIONS | POOLS
"""Functions that a deferred tensor can be computed together with."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A tensor that was not used yet, of which the images have the shape and type before what follows."""

    placeholder: Tensor
    images: Tensor
    compute: Compute
    followers: Followers


class DeferredTensors:
    """Placeholders of tensors, within a mode that sees every function call.

    Functions that follow at once, an addition, ReLU and max-pooling, are computed with the tensor. Any other use
    computes it.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._known: dict[int, tuple[Tensor, Tensor | None]] = {}

    def add(self, images: Tensor, compute: Compute) -> Tensor:
        """Return the placeholder of a tensor of the shape and type of images."""
        return self._wait(_Waiting(images.new_empty(0), images, compute, NOTHING))

    @property
    def is_empty(self) -> bool:
        """Whether there are no placeholders."""
        return not (self._waiting or self._known)

    def follow(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the placeholder of a function of a deferred tensor, or None where it cannot be computed with it."""
        if function in ADDITIONS:
            return self._follow_by_addition(function, args, kwargs)
        waiting = self._waiting.get(id(args[0])) if args else None
        if waiting is None or waiting.followers.pool:
            return None
        if function in RELUS and len(args) == 1:
            in_place = function in IN_PLACE or kwargs.get("inplace", False)
            return self._extend(waiting, in_place, relu=True)
        is_plain = waiting.followers.relu and waiting.followers.addend is None
        if function in POOLS and is_plain and _halves(waiting.images, *args[1:], **kwargs):
            return self._extend(waiting, in_place=False, pool=True)
        return None

    def _follow_by_addition(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        if len(args) != 2 or kwargs or args[0] is args[1]:
            return None
        for one, other in (args, args[::-1]):
            waiting = self._waiting.get(id(one))
            if waiting is None or waiting.followers is not NOTHING or (function in IN_PLACE and one is not args[0]):
                continue
            addend = self._value(other)
            if isinstance(addend, Tensor) and (addend.shape, addend.dtype) == (
                waiting.images.shape,
                waiting.images.dtype,
            ):
                return self._extend(waiting, function in IN_PLACE, addend=addend)
        return None

    def _extend(self, waiting: _Waiting, in_place: bool, **changes: Any) -> Tensor:
        """Return the placeholder of what follows; the tensor itself is not known, or replaced by it, afterwards."""
        old = waiting.placeholder
        followers = replace(waiting.followers, **changes)
        result = self._wait(_Waiting(old.new_empty(0), waiting.images, waiting.compute, followers))
        del self._waiting[id(old)]
        self._known[id(old)] = old, result if in_place else None
        return result

    def _wait(self, waiting: _Waiting) -> Tensor:
        self._waiting[id(waiting.placeholder)] = waiting
        return waiting.placeholder

    def resolved(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return arguments with tensors in place of placeholders."""
        if self.is_empty:
            return args, dict(kwargs)
        return [self._value(each) for each in args], {name: self._value(each) for name, each in kwargs.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self._value, value))
        if (waiting := self._waiting.pop(id(value), None)) is not None:
            self._known[id(value)] = waiting.placeholder, waiting.compute(waiting.followers)
        if id(value) not in self._known:
            return value
        known = self._known[id(value)][1]
        if known is None:
            raise UnsupportedError("the output of a batch-norm layer is used both with what follows it and without")
        return self._value(known)


def _halves(
    images: Tensor,
    kernel_size: Any = None,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Return whether such a max-pooling halves the sides of images, which are even."""
    is_plain = padding in (0, (0, 0)) and dilation in (1, (1, 1)) and not return_indices
    is_halving = kernel_size in (2, (2, 2)) and stride in (None, 2, (2, 2))
    return is_plain and is_halving and images.shape[2] % 2 == 0 and images.shape[3] % 2 == 0
