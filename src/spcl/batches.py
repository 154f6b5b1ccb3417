"""Batches of samples: inputs, which are a tensor or a dict or tuple of tensors, and targets."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.errors import DataError

__all__ = [
    "ARRAYS",
    "ArrayLike",
    "Batch",
    "BatchLike",
    "Inputs",
    "InputsLike",
    "as_batch",
    "as_inputs",
    "as_tensor",
    "concatenate",
    "converted",
    "describe",
    "from_leaves",
    "leaves",
    "map_leaves",
    "number_of_samples",
    "sample_kind",
    "split",
]

ARRAYS = (Tensor, np.ndarray)
"""The types of an ArrayLike."""

ArrayLike: TypeAlias = Tensor | NDArray[Any]
Inputs: TypeAlias = Tensor | dict[str, Tensor] | tuple[Tensor, ...]
"""Inputs of a batch, which the backbone gets as one argument; all tensors have one row per sample."""
InputsLike: TypeAlias = ArrayLike | Mapping[str, ArrayLike] | Sequence[ArrayLike]
Batch: TypeAlias = tuple[Inputs, Tensor]
BatchLike: TypeAlias = tuple[InputsLike, ArrayLike]


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
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x, y
        if isinstance(x, (*ARRAYS, Mapping, tuple, list)) and isinstance(y, ARRAYS):
            return as_inputs(x), as_tensor(y)
    raise DataError(
        f"a batch is a pair of tensors or NumPy arrays (inputs, targets), but it is {_kind(batch)}; "
        f"convert the parts with torch.as_tensor"
    )


def as_tensor(array: ArrayLike) -> Tensor:
    """Return a tensor as it is; copy a NumPy array, because its owner may overwrite it or make it read-only.

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


# -- inputs


def as_inputs(x: object) -> Inputs:
    """Return inputs as a tensor, a dict of tensors or a tuple of tensors; other mappings and lists become these.

    >>> as_inputs({"tokens": np.array([[7, 9]]), "mask": torch.tensor([[True, False]])})
    {'tokens': tensor([[7, 9]]), 'mask': tensor([[ True, False]])}
    >>> as_inputs((torch.zeros(3, 2), torch.zeros(4)))
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: the parts of the inputs have different numbers of samples, [0]: 3 and [1]: 4; give every part
    one row per sample
    """
    if isinstance(x, ARRAYS):
        return as_tensor(x)
    if isinstance(x, Mapping):
        _check_parts(x)
        inputs: Inputs = {name: as_tensor(part) for name, part in x.items()}
    elif isinstance(x, tuple | list):
        _check_parts({f"[{index}]": part for index, part in enumerate(x)})
        inputs = tuple(as_tensor(part) for part in x)
    else:
        raise DataError(
            f"inputs are a tensor or NumPy array, or a dict or tuple of them, but they are a {type(x).__name__}; "
            f"convert them with torch.as_tensor"
        )
    sizes = {name.removeprefix("."): len(leaf) if leaf.ndim else 0 for name, leaf in leaves(inputs).items()}
    first, *others = sizes
    for other in others:
        if sizes[other] != sizes[first]:
            raise DataError(
                f"the parts of the inputs have different numbers of samples, {first}: {sizes[first]} and {other}: "
                f"{sizes[other]}; give every part one row per sample"
            )
    return inputs


def leaves(x: Inputs) -> dict[str, Tensor]:
    """Return the tensors by name: ``""`` for a tensor, ``".key"`` for parts of a dict, ``"[0]"`` for parts of a tuple.

    >>> leaves((torch.tensor([1]), torch.tensor([2])))
    {'[0]': tensor([1]), '[1]': tensor([2])}
    """
    if isinstance(x, Tensor):
        return {"": x}
    if isinstance(x, dict):
        return {f".{name}": leaf for name, leaf in x.items()}
    return {f"[{index}]": leaf for index, leaf in enumerate(x)}


def from_leaves(named: Mapping[str, Tensor]) -> Inputs:
    """Return the inputs that have these :func:`leaves`.

    >>> from_leaves({".tokens": torch.tensor([1])})
    {'tokens': tensor([1])}
    """
    if "" in named:
        return named[""]
    if all(name.startswith(".") for name in named):
        return {name[1:]: leaf for name, leaf in named.items()}
    return tuple(named.values())


def map_leaves(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply a function to every tensor of the inputs.

    >>> map_leaves(lambda leaf: 2 * leaf, {"a": torch.tensor([1]), "b": torch.tensor([2])})
    {'a': tensor([2]), 'b': tensor([4])}
    """
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: function(leaf) for name, leaf in x.items()}
    return tuple(function(leaf) for leaf in x)


def converted(x: Inputs, signature: str | None, dtype: torch.dtype) -> Inputs:
    """Return inputs with their floating-point tensors in the type that a task takes; other inputs as they are.

    Args:
        x: the inputs, or the targets.
        signature: the :func:`describe` of one sample of the task. None for a new task: float32 and float64 become
            ``dtype``, and half precision, which somebody chose, stays.
        dtype: of the model.

    >>> converted(torch.ones(1, 2, dtype=torch.float64), "float32[2]", torch.float64).dtype
    torch.float32
    >>> converted(torch.ones(1, 2, dtype=torch.float64), None, torch.float32).dtype
    torch.float32
    """
    if signature is None:
        return _with_dtype(x, dtype, (torch.float32, torch.float64))
    if describe(x, 1) == signature:
        return x
    nothing = map_leaves(lambda leaf: leaf[:0], x) if number_of_samples(x) else x
    for each in FLOATS:
        if describe(_with_dtype(nothing, each), 1) == signature:
            return _with_dtype(x, each)
    return x


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _with_dtype(x: Inputs, dtype: torch.dtype, types: Sequence[torch.dtype] = FLOATS) -> Inputs:
    if isinstance(x, Tensor):
        return x.to(dtype) if x.dtype in types else x
    return map_leaves(lambda leaf: leaf.to(dtype) if leaf.dtype in types else leaf, x)


def number_of_samples(x: Inputs) -> int:
    """Return the number of samples; 0 if a tensor has no dimensions.

    >>> number_of_samples((torch.zeros(3, 2), torch.zeros(3)))
    3
    """
    leaf = x if isinstance(x, Tensor) else next(iter(leaves(x).values()))
    return leaf.shape[0] if leaf.ndim else 0


def concatenate(parts: Sequence[Inputs]) -> Inputs:
    """Concatenate inputs of one :func:`sample_kind` to one batch; a single part is returned as it is.

    >>> concatenate([{"a": torch.tensor([1])}, {"a": torch.tensor([2, 3])}])
    {'a': tensor([1, 2, 3])}
    """
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(cast(list[Tensor], parts))
    named = [leaves(part) for part in parts]
    return from_leaves({name: torch.cat([part[name] for part in named]) for name in named[0]})


def split(x: Inputs, size: int) -> Iterator[Inputs]:
    """Split inputs into batches of at most ``size`` samples.

    >>> [len(part) for part in split(torch.zeros(5, 2), 2)]
    [2, 2, 1]
    """
    for start in range(0, number_of_samples(x), size):
        yield map_leaves(lambda leaf: leaf[start : start + size], x)  # noqa: B023 (it is called at once)


def sample_kind(x: Inputs) -> Hashable:
    """Return structure, shape and type of one sample: inputs with the same kind can be one batch.

    >>> sample_kind(torch.zeros(3, 2)) == sample_kind(torch.ones(5, 2)) != sample_kind((torch.zeros(3, 2),))
    True
    """
    if isinstance(x, Tensor):
        return x.dtype, x.shape[1:]
    return frozenset((name, leaf.dtype, leaf.shape[1:]) for name, leaf in leaves(x).items())


def kind_of_pair(x: Inputs, y: Tensor) -> tuple[int, Hashable]:
    """Return the number of inputs, and the :func:`sample_kind` of inputs and targets together.

    >>> kind_of_pair(torch.zeros(3, 2), torch.zeros(3)) == kind_of_pair(torch.ones(3, 2), torch.ones(3))
    True
    """
    return number_of_samples(x), (sample_kind(x), sample_kind(y))


def describe(x: Inputs, skipped: int = 0) -> str:
    """Return type and shape as text, without the first ``skipped`` dimensions; the parts of a dict in sorted order.

    >>> describe({"tokens": torch.zeros(8, 16, dtype=torch.int64), "mask": torch.ones(8, 16)}, 1)
    '{mask: float32[16], tokens: int64[16]}'
    """
    if isinstance(x, Tensor):
        return _describe(x.dtype, x.shape[skipped:])
    if isinstance(x, dict):
        return f"{{{', '.join(f'{name}: {describe(x[name], skipped)}' for name in sorted(x))}}}"
    return f"({', '.join(describe(leaf, skipped) for leaf in x)})"


@lru_cache(maxsize=1024)
def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _check_parts(parts: Mapping[Any, object]) -> None:
    """Raise an error unless the parts are a flat, non-empty collection of arrays."""
    if not parts:
        raise DataError("the inputs are an empty dict or tuple; give at least one tensor")
    for name, part in parts.items():
        if not isinstance(name, str):
            raise DataError(f"the dict of inputs has the key {name!r}; give every part a name that is a text")
        if not isinstance(part, ARRAYS):
            raise DataError(
                f"part {name!r} of the inputs is a {type(part).__name__}; inputs are a tensor or NumPy array, or a "
                f"flat dict or tuple of them"
            )


def _kind(batch: object) -> str:
    if not isinstance(batch, tuple | list):
        return f"a {type(batch).__name__}"
    return f"a {type(batch).__name__} of {len(batch)} ({', '.join(type(part).__name__ for part in batch[:3])})"
