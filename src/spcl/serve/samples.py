"""Samples in requests: nested lists of numbers become tensors of the shape and type that a task was trained on."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spcl.batches import Inputs, describe
from spcl.errors import DataError

__all__ = ["check_samples", "samples_from_lists"]


def samples_from_lists(values: Any, signature: str) -> Inputs:
    """Return nested lists, or a dict of them, as tensors with the types in a task's signature.

    Args:
        values: one list per sample; for inputs with several named parts a dict of such lists.
        signature: shape and type of one sample, as of :func:`spcl.batches.describe`.

    >>> samples_from_lists([[1, 2], [3, 4]], "float32[2]")
    tensor([[1., 2.],
            [3., 4.]])
    >>> samples_from_lists({"tokens": [[7, 9]]}, "{tokens: int64[2]}")
    {'tokens': tensor([[7, 9]])}
    >>> samples_from_lists([[1, 2], [3]], "float32[2]")
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: the inputs are no samples of float32[2]: expected sequence of length 2 at dim 1 (got 1)
    """
    if isinstance(values, Mapping):
        return {name: _tensor(part, _part_signature(signature, name)) for name, part in values.items()}
    return _tensor(values, signature)


def check_samples(x: Inputs, signatures: Sequence[str]) -> None:
    """Refuse inputs whose samples are of none of these shapes and types.

    >>> check_samples(torch.zeros(3, 2), ["float32[4]"])
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: the inputs have samples of float32[2], but the task was trained on float32[4]
    """
    if (found := describe(x, 1)) not in signatures:
        raise DataError(f"the inputs have samples of {found}, but the task was trained on {' or '.join(signatures)}")


def _part_signature(signature: str, name: str) -> str:
    found = re.search(rf"[{{ ]{re.escape(name)}: (\w+\[.*?\])", signature)
    if found is None:
        raise DataError(f"the inputs have a part {name!r}, but samples are {signature}")
    return found[1]


def _tensor(values: Any, signature: str) -> Tensor:
    dtype = getattr(torch, signature.partition("[")[0], None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"samples are {signature}, which plain lists cannot say; send safetensors instead")
    try:
        return torch.tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"the inputs are no samples of {signature}: {error}") from None
