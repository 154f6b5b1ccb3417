"""Samples of the types that the backbone was built for: empty ones, and those in requests, from nested lists."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spcl.batches import Inputs
from spcl.errors import DataError
from spcl.models import InputSpec

__all__ = ["example_inputs", "samples_from_lists"]


def example_inputs(inputs: InputSpec) -> Inputs:
    """Return an empty batch of such inputs.

    >>> example_inputs(InputSpec((4,), torch.float32)).shape
    torch.Size([0, 4])
    """
    if inputs.parts is None:
        return torch.empty((0, *inputs.shape), dtype=inputs.dtype)
    return _joined({name: torch.empty((0, *part.shape), dtype=part.dtype) for name, part in inputs.parts.items()})


def samples_from_lists(values: Any, inputs: InputSpec) -> Inputs:
    """Return samples as tensors.

    Args:
        values: a list with one entry per sample, each a number or nested lists of them; for inputs with several parts
            a dict of such lists, by name or, where samples are tuples, by position.
        inputs: the types of samples.

    >>> samples_from_lists([[1, 2], [3, 4]], InputSpec((2,), torch.float32))
    tensor([[1., 2.],
            [3., 4.]])
    >>> samples_from_lists([[1, 2], [3]], InputSpec((2,), torch.float32))
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: the inputs are no samples of float32[2]: expected sequence of length 2 at dim 1 (got 1)
    """
    if inputs.parts is None:
        return _tensor(values, inputs, "the inputs")
    if not isinstance(values, Mapping) or values.keys() != inputs.parts.keys():
        found = f"parts {list(values)}" if isinstance(values, Mapping) else f"a {type(values).__name__}"
        raise DataError(f"the inputs are {found}; give an object with the parts {list(inputs.parts)}")
    return _joined(
        {name: _tensor(values[name], part, f"part {name!r} of the inputs") for name, part in inputs.parts.items()}
    )


def _joined(parts: dict[str, Tensor]) -> Inputs:
    """Return parts as a tuple where their names are the numbers from 0, in any order, and else as they are."""
    numbers = [str(index) for index in range(len(parts))]
    return tuple(parts[number] for number in numbers) if parts.keys() == set(numbers) else parts


def _tensor(values: Any, inputs: InputSpec, owner: str) -> Tensor:
    try:
        return torch.tensor(values, dtype=inputs.dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = f"{str(inputs.dtype).removeprefix('torch.')}{list(inputs.shape)}"
        raise DataError(f"{owner} are no samples of {kind}: {error}") from None
