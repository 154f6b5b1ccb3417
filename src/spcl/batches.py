"""Batches of samples as pairs of tensors, also where they arrive as NumPy arrays."""

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.errors import DataError

__all__ = ["ARRAYS", "ArrayLike", "Batch", "BatchLike", "as_batch", "as_tensor"]

ARRAYS = (Tensor, np.ndarray)
"""The types of an ArrayLike."""

ArrayLike: TypeAlias = Tensor | NDArray[Any]
Batch: TypeAlias = tuple[Tensor, Tensor]
BatchLike: TypeAlias = tuple[ArrayLike, ArrayLike]


def as_batch(batch: object) -> Batch:
    """Return a pair (inputs, targets) as tensors; NumPy arrays are copied and keep their type.

    >>> as_batch((np.array([[1.5]]), torch.tensor([0])))
    (tensor([[1.5000]], dtype=torch.float64), tensor([0]))
    >>> as_batch([1.5, 0])
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: a batch is a pair of tensors or NumPy arrays (inputs, targets), but it is a list of 2
    (float, int); convert the parts with torch.as_tensor
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        x, y = batch
        if isinstance(x, ARRAYS) and isinstance(y, ARRAYS):
            return as_tensor(x), as_tensor(y)
    raise DataError(
        f"a batch is a pair of tensors or NumPy arrays (inputs, targets), but it is {_kind(batch)}; "
        f"convert the parts with torch.as_tensor"
    )


def as_tensor(array: ArrayLike) -> Tensor:
    """Return a tensor as it is, and a NumPy array as a copy, which its owner may overwrite or protect.

    >>> as_tensor(np.arange(3)[::-1])
    tensor([2, 1, 0])
    """
    if isinstance(array, Tensor):
        return array
    try:
        return torch.tensor(np.ascontiguousarray(array) if array.ndim else array)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a NumPy array of type {array.dtype} and shape {array.shape} cannot become a tensor ({error}); "
            f"convert it to a numeric type"
        ) from None


def _kind(batch: object) -> str:
    if not isinstance(batch, tuple | list):
        return f"a {type(batch).__name__}"
    return f"a {type(batch).__name__} of {len(batch)} ({', '.join(type(part).__name__ for part in batch[:3])})"
