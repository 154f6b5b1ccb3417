"""Augmentation of the inputs of several tasks at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spcl.errors import SpclError
from spcl.transforms import Transform

__all__ = ["augmented"]


def augmented(transform: Transform, inputs: Sequence[Tensor], device: torch.device) -> list[Tensor]:
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
    kinds: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for index, x in enumerate(inputs):
        kinds.setdefault((x.dtype, x.shape[1:]), []).append(index)
    results = list(inputs)
    for indices in kinds.values():
        parts = [results[index].to(device, non_blocking=True) for index in indices]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        sizes = [len(part) for part in parts]
        for index, result in zip(indices, _transformed(transform, whole).split(sizes), strict=True):  # type: ignore[no-untyped-call]
            results[index] = result
    return results


def _transformed(transform: Transform, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: object = transform(x)
    if not isinstance(result, Tensor) or result.ndim == 0 or len(result) != len(x):
        found = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise SpclError(f"augment must give a tensor with as many samples as it gets, {len(x)}, but it gives {found}")
    return result
