"""Messages as bytes: safetensors with a batch, or an announcement in the metadata; never a pickle."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from spcl.batches import Batch, BatchLike, Inputs, as_batch, as_inputs, leaves
from spcl.errors import DataError, SpclError
from spcl.sources.schema import Schema

__all__ = ["MAX_BYTES", "Letter", "decode", "decode_inputs", "encode_batch", "encode_end", "encode_start"]

MAX_BYTES = 64 * 2**20

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


def decode(data: bytes, max_bytes: int = MAX_BYTES) -> Letter:
    """Return what a message says; raise a :class:`DataError` if it is malformed or larger than ``max_bytes``.

    >>> decode(b"hello")
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: the message is no safetensors: Error while deserializing: header too small
    """
    if len(data) > max_bytes:
        raise DataError(f"the message has {len(data)} bytes, and at most {max_bytes} are accepted; split it")
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


def _metadata(content: str, schema: Schema | None) -> dict[str, str]:
    return {CONTENT: content} | ({} if schema is None else {TASK: schema.model_dump_json()})


def _decode(data: bytes) -> Letter:
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, Any] = header.get("__metadata__", {})
    content = metadata.get(CONTENT, "batch")
    schema = Schema.parsed(json.loads(metadata[TASK])) if TASK in metadata else None
    if content == "end":
        return Letter("end")
    if content == "start":
        if schema is None:
            raise DataError("the announcement does not say what the task is; send its kind and classes")
        return Letter("start", schema=schema)
    if content != "batch":
        raise DataError(f"the message says it is {content!r:.80}; send batch, start or end")
    return Letter("batch", _batch(tensors), schema)


def _batch(tensors: dict[str, Tensor]) -> Batch:
    if "y" not in tensors or len(tensors) < 2:
        raise DataError(f"the message has the tensors {sorted(tensors)!r:.200}; send x and y")
    y = tensors.pop("y")
    return as_batch((as_inputs(_inputs(tensors)), y))


def _inputs(tensors: dict[str, Tensor]) -> Inputs:
    if tensors.keys() == {"x"}:
        return tensors["x"]
    if all(name.startswith("x.") for name in tensors):
        return {name[2:]: leaf for name, leaf in tensors.items()}
    indices = [f"x[{index}]" for index in range(len(tensors))]
    if tensors.keys() != set(indices):
        raise DataError(f"the message has the tensors {sorted(tensors)!r:.200}; send x (or its parts) and y")
    return tuple(tensors[name] for name in indices)
