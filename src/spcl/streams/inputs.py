"""Inputs of many samples: a tensor, or a dict or tuple of tensors with one first dimension."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

__all__ = ["Inputs", "count_samples", "map_parts", "parts_of"]

Inputs: TypeAlias = Tensor | dict[str, Tensor] | tuple[Tensor, ...]


def parts_of(x: Inputs) -> list[Tensor]:
    """Return the tensors that inputs consist of."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values() if isinstance(x, dict) else x)


def count_samples(x: Inputs) -> int:
    """Return the number of samples.

    >>> import torch
    >>> count_samples({"input_ids": torch.zeros(3, 8), "attention_mask": torch.ones(3, 8)})
    3
    """
    return len(parts_of(x)[0])


def map_parts(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs of the same structure, with the function applied to every tensor.

    >>> import torch
    >>> map_parts((torch.zeros(3, 2), torch.ones(3)), lambda part: part[:1])
    (tensor([[0., 0.]]), tensor([1.]))
    """
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: function(part) for name, part in x.items()}
    return tuple(function(part) for part in x)
