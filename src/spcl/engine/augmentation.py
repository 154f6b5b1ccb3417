"""Augmentation of the inputs of several tasks at once."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from spcl.batches import Inputs, concatenate, describe, map_leaves, number_of_samples, sample_kind
from spcl.errors import SpclError, is_out_of_memory
from spcl.transforms import Transform

__all__ = ["augmented"]


def augmented(transform: Transform, inputs: Sequence[Inputs], device: torch.device) -> list[Inputs]:
    """Return the inputs on the device, transformed in one call for all that have the same shape and type.

    >>> calls = []
    >>> def double(x):
    ...     calls.append(len(x))
    ...     return 2 * x
    >>> augmented(double, [torch.ones(1, 2), torch.ones(1, 3), torch.zeros(2, 2)], torch.device("cpu"))
    [tensor([[2., 2.]]), tensor([[2., 2., 2.]]), tensor([[0., 0.],
            [0., 0.]])]
    >>> calls
    [3, 1]
    """
    kinds: dict[Hashable, list[int]] = {}
    for index, x in enumerate(inputs):
        kinds.setdefault(sample_kind(x), []).append(index)
    results = list(inputs)
    for indices in kinds.values():
        parts = [map_leaves(lambda leaf: leaf.to(device, non_blocking=True), inputs[index]) for index in indices]
        whole = _transformed(transform, concatenate(parts))
        start = 0
        for index, part in zip(indices, parts, strict=True):
            rows = slice(start, start + number_of_samples(part))
            results[index] = map_leaves(lambda leaf: leaf[rows], whole)  # noqa: B023 (it is called at once)
            start = rows.stop
    return results


def _transformed(transform: Transform, x: Inputs) -> Inputs:
    try:
        with torch.no_grad():
            result: Any = transform(x)
    except Exception as error:  # a transform of the user's may fail in any way
        if isinstance(error, SpclError) or is_out_of_memory(error):
            raise
        kind = f"{number_of_samples(x)} samples of {describe(x, 1)}"
        raise SpclError(f"augment raised {type(error).__name__} on {kind}: {error}") from error
    if type(result) is not type(x):
        raise SpclError(f"augment must give a {type(x).__name__} as it gets, but it gives a {type(result).__name__}")
    count, given = number_of_samples(result), number_of_samples(x)
    if count != given:
        raise SpclError(f"augment must give as many samples as it gets, {given}, but it gives {count}")
    return result
