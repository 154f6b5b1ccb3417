"""Messages as bytes: safetensors with a batch, or an announcement in the metadata; never a pickle."""

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from spcl.batches import Batch, BatchLike, Inputs, as_batch, as_inputs, leaves
from spcl.errors import DataError, SpclError
from spcl.sources.base import Data
from spcl.sources.schema import Schema

__all__ = ["MAX_BYTES", "Letter", "decode", "decode_inputs", "encode_batch", "encode_end", "encode_start", "too_large"]

MAX_BYTES = 64 * 2**20

CACHED_BYTES = 4096  # the longest header that is remembered
CONTENT = "spcl"
TASK = "task"


@dataclass(frozen=True, eq=False)
class Letter:
    """What a message says.

    Attributes:
        content: whether it is a batch, or announces that the task starts or ends.
        batch: inputs and targets of a batch.
        schema: of the task that starts; a batch may repeat it, so that a trimmed stream still says what its task is.
    """

    content: Literal["batch", "start", "end"]
    batch: Batch | None = None
    schema: Schema | None = None


def encode_batch(batch: BatchLike, schema: Schema | None = None) -> bytes:
    """Return a batch as safetensors: the targets are ``y``, the inputs ``x``, or ``x.name`` or ``x[0]`` of their parts.

    >>> import torch
    >>> letter = decode(encode_batch(({"tokens": torch.tensor([[7, 9]])}, torch.tensor([1]))))
    >>> letter.batch
    ({'tokens': tensor([[7, 9]])}, tensor([1]))
    """
    x, y = as_batch(batch)
    tensors = {f"x{name}": leaf for name, leaf in leaves(x).items()} | {"y": y}
    copies = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}  # none share memory
    return safetensors.torch.save(copies, _metadata("batch", schema))


def encode_start(schema: Schema) -> bytes:
    """Return the announcement that a task starts."""
    return safetensors.torch.save({}, _metadata("start", schema))


def encode_end() -> bytes:
    """Return the announcement that a task has ended."""
    return safetensors.torch.save({}, _metadata("end", None))


def decode(data: Data, max_bytes: int = MAX_BYTES) -> Letter:
    """Return what a message says; raise a :class:`DataError` if it is malformed or larger than ``max_bytes``.

    >>> decode(b"hello")
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: the message is no safetensors: Error while deserializing: header too small
    """
    if len(data) > max_bytes:
        raise too_large(len(data), max_bytes)
    try:
        return _decode(data)
    except SpclError as error:
        raise DataError(str(error)) from None
    except Exception as error:  # bytes from anywhere: whatever they cause, they are no reason to stop
        raise DataError(f"the message is no safetensors: {error!s:.200}") from None


def decode_inputs(data: bytes) -> Inputs:
    """Return inputs without targets, as of :func:`encode_batch`; raise a :class:`DataError` if they are malformed.

    >>> import torch
    >>> decode_inputs(safetensors.torch.save({"x.tokens": torch.tensor([[7, 9]])}))
    {'tokens': tensor([[7, 9]])}
    """
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:
        raise DataError(f"the inputs are not in the safetensors format: {error!s:.200}") from None
    if not tensors:
        raise DataError("the inputs have no tensors; send x, or x.name or x[0] of its parts")
    return as_inputs(_inputs(tensors))


def too_large(size: int, max_bytes: int) -> DataError:
    """Return the error of a message with too many bytes."""
    return DataError(f"the message has {size} bytes, and at most {max_bytes} are accepted; split it")


def _metadata(content: str, schema: Schema | None) -> dict[str, str]:
    return {CONTENT: content} | ({} if schema is None else {TASK: schema.model_dump_json()})


def _decode(data: Data) -> Letter:
    start = 8 + int.from_bytes(data[:8], "little")
    layout = _layout if start <= CACHED_BYTES else _layout.__wrapped__
    letter, slots = layout(bytes(data[:start]), max(0, len(data) - start))
    if letter.content != "batch":
        return letter
    shared = data if isinstance(data, bytearray) else bytearray(data)
    return Letter("batch", _pair({name: slot.tensor(shared, start) for name, slot in slots.items()}), letter.schema)


@dataclass(frozen=True)
class _Slot:
    """Where a tensor is in the body of a message, and what it is."""

    first: int
    dtype: torch.dtype
    shape: torch.Size

    def tensor(self, data: bytearray, start: int) -> Tensor:
        """Return the tensor in a message whose body starts there.

        By way of NumPy, which keeps Python's lock: operations of PyTorch give it away, and to get it back from a thread
        that trains takes longer than all the rest.
        """
        values = np.ndarray(self.shape, _numpy_type(self.dtype), data, start + self.first)
        tensor = torch.from_numpy(values if values.flags.aligned else values.copy())
        return tensor if tensor.dtype == self.dtype else tensor.view(self.dtype)


@cache
def _numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the same type, or integers of the same size where NumPy has none."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return np.dtype(f"i{dtype.itemsize}")


@lru_cache(maxsize=1024)
def _layout(header: bytes, size: int) -> tuple[Letter, dict[str, _Slot]]:
    """Return what a message with this header says, and where its tensors are in a body of so many bytes.

    Messages of a task have the same header again and again: it is checked, by safetensors and as a batch, once.
    """
    tensors = safetensors.torch.load(header + bytes(size))
    entries = json.loads(header[8:])
    letter = _letter(entries.get("__metadata__", {}))
    if letter.content == "batch":
        as_batch(_pair(dict(tensors)))
    first = {name: entries[name]["data_offsets"][0] for name in tensors}
    return letter, {name: _Slot(first[name], leaf.dtype, leaf.shape) for name, leaf in tensors.items()}


def _letter(metadata: dict[str, Any]) -> Letter:
    """Return what the metadata say, without the batch."""
    content = metadata.get(CONTENT, "batch")
    schema = _schema(metadata[TASK]) if TASK in metadata else None
    if content == "end":
        return Letter("end")
    if content == "start":
        if schema is None:
            raise DataError("the announcement does not say what the task is; send its kind and classes")
        return Letter("start", schema=schema)
    if content != "batch":
        raise DataError(f"the message says it is {content!r:.80}; send batch, start or end")
    return Letter("batch", schema=schema)


@lru_cache(maxsize=1024)
def _schema(text: str) -> Schema:
    """Return the schema that a message repeats, as one object, so that it is compared by one look."""
    return Schema.parsed(json.loads(text))


def _pair(tensors: dict[str, Tensor]) -> Batch:
    """Return inputs and targets; takes the targets out."""
    if "y" not in tensors or len(tensors) < 2:
        raise DataError(f"the message has the tensors {sorted(tensors)!r:.200}; send x and y")
    y = tensors.pop("y")
    return _inputs(tensors), y


def _inputs(tensors: dict[str, Tensor]) -> Inputs:
    if tensors.keys() == {"x"}:
        return tensors["x"]
    if all(name.startswith("x.") for name in tensors):
        return {name[2:]: leaf for name, leaf in tensors.items()}
    indices = [f"x[{index}]" for index in range(len(tensors))]
    if tensors.keys() != set(indices):
        raise DataError(f"the message has the tensors {sorted(tensors)!r:.200}; send x (or its parts) and y")
    return tuple(tensors[name] for name in indices)
