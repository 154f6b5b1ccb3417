"""Messages as bytes: safetensors with a batch, or an announcement in the metadata; never a pickle."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from spcl._util.registry import Named
from spcl.batches import Batch, BatchLike, Inputs, as_batch, as_inputs, leaves
from spcl.errors import DataError, SpclError, TaskError
from spcl.sources.base import Data, check_task_name
from spcl.tasks import TaskDescription

MAX_BYTES = 64 * 2**20

MOST_OUTPUTS = 100_000  # the head of a task that a message announces must fit into memory
MOST_ENCODER_BYTES = 1000  # of an encoder's name and options
CACHED_BYTES = 4096  # the longest header that is remembered
CONTENT = "spcl"
TASK = "task"
OPENING = b'{"__metadata__":{'  # of a header
SEQUENCE = re.compile(re.escape(OPENING) + rb'("from":"([A-Za-z0-9_.-]{1,100}):([0-9]{1,18})",)')
PUBLISHER = re.compile(r"[A-Za-z0-9_.-]{1,100}")


@dataclass(frozen=True)
class Announcement:
    """What a source says of itself.

    Attributes:
        source: its name.
        task: what its samples answer; named as the source where it does not say so.
        encoder: the name of its encoder, or its name and options; None where it does not say.
    """

    source: str
    task: TaskDescription
    encoder: Named | None = None

    def __str__(self) -> str:
        """Return what the source answers in words."""
        named = "" if self.task.name == self.source else f"task {self.task.name!r} with "
        return f"{named}{self.task}" + ("" if self.encoder is None else f" through the encoder {self.encoder!r}")


@dataclass(frozen=True, eq=False)
class Letter:
    """What a message says.

    Attributes:
        content: whether it is a batch, or announces that the source starts or ends.
        batch: inputs and targets of a batch.
        announced: the source that starts; a batch may repeat it, so that a trimmed stream still says what it is.
    """

    content: Literal["batch", "start", "end"]
    batch: Batch | None = None
    announced: Announcement | None = None


def describe_task(
    name: str, kind: str = "classification", classes: int | Sequence[str] | None = None
) -> TaskDescription:
    """Return the description of a task that may be announced, or raise a :class:`~spcl.errors.TaskError`.

    Args:
        name: of the task.
        kind: what its targets are.
        classes: the number or names of classes, labels or numbers; by default one number for a regression.
    """
    task = TaskDescription.of(name, kind, classes)
    if (task.classes or 0) > MOST_OUTPUTS:
        raise TaskError(f"task {name!r} has {task.classes} classes, and at most {MOST_OUTPUTS} can be announced")
    if (text := "".join(task.class_names or ())) != text.encode(errors="ignore").decode():
        raise TaskError(
            f"task {name!r} has names of classes that are no Unicode: {task.class_names!r:.80}; rename them"
        )
    return task


def announce(
    source: str,
    kind: str = "classification",
    classes: int | Sequence[str] | None = None,
    task: str | None = None,
    encoder: Named | None = None,
) -> Announcement:
    """Return an announcement, or raise a :class:`~spcl.errors.TaskError` if a source cannot say so.

    Args:
        source: its name.
        kind: what the targets of its task are.
        classes: the number or names of classes, labels or numbers of its task.
        task: the name of the task, which other sources may answer, too; by default one of the source's name.
        encoder: the name of its encoder, or its name and options.

    >>> announce("watch-1", classes=["sit", "walk"], task="activity").task.name
    'activity'
    """
    description = describe_task(source if task is None else check_task_name(task), kind, classes)
    name = encoder.get("name") if isinstance(encoder, dict) else encoder
    if encoder is not None and not (isinstance(name, str) and name and len(json.dumps(encoder)) <= MOST_ENCODER_BYTES):
        raise TaskError(
            f"source {source!r} cannot have the encoder {encoder!r:.80}; give its name, or name and options"
        )
    return Announcement(source, description, encoder)


def announcement_to_json(announced: Announcement) -> dict[str, Any]:
    """Return what a source says of itself, but for its name, as plain data."""
    task = announced.task
    values = {"kind": task.kind, "classes": task.classes if task.class_names is None else list(task.class_names)}
    more = {"task": None if task.name == announced.source else task.name, "encoder": announced.encoder}
    return values | {name: value for name, value in more.items() if value is not None}


def announcement_from_json(source: str, values: Any) -> Announcement:
    """Return what a source says of itself in plain data.

    >>> announcement_from_json("pets", {"classes": ["cat", "dog"]}).task.class_names
    ('cat', 'dog')
    """
    if not isinstance(values, dict) or not values.keys() <= {"kind", "classes", "task", "encoder"}:
        raise TaskError(
            f"source {source!r} cannot be described by {values!r:.120}; give kind, classes, task and encoder"
        )
    return announce(source, **values)


def encode_batch(batch: BatchLike, announced: Announcement | None = None) -> bytes:
    """Return a batch as safetensors: the targets are ``y``, the inputs ``x``, or ``x.name`` or ``x[0]`` of their parts.

    Args:
        batch: inputs and targets.
        announced: the announcement of its source, which the message then repeats.

    >>> import torch
    >>> letter = decode(encode_batch(({"tokens": torch.tensor([[7, 9]])}, torch.tensor([1]))))
    >>> letter.batch
    ({'tokens': tensor([[7, 9]])}, tensor([1]))
    """
    x, y = as_batch(batch)
    tensors = {f"x{name}": leaf for name, leaf in leaves(x).items()} | {"y": y}
    copies = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}  # none share memory
    return _encoded(copies, "batch", announced)


def encode_start(announced: Announcement) -> bytes:
    """Return the message that a source starts."""
    return _encoded({}, "start", announced)


def encode_end() -> bytes:
    """Return the message that a source has ended."""
    return _encoded({}, "end")


def stamped(data: bytes, publisher: str, number: int) -> bytes:
    """Return a message with its publisher and number, by which a hub recognises it when it is appended again.

    >>> sequence_of(stamped(encode_end(), "camera-1", 7))
    ('camera-1', 7)
    """
    return _extended(data, f'"from":"{publisher}:{number}",'.encode())


def sequence_of(data: Data) -> tuple[str, int] | None:
    """Return publisher and number of a message; None if it has none."""
    match = SEQUENCE.match(data, 8)
    return None if match is None else (match[2].decode(), int(match[3]))


def decode(data: Data, max_bytes: int = MAX_BYTES, source: str = "") -> Letter:
    """Return what a message says; raise a :class:`~spcl.errors.DataError` if it is malformed or too large.

    Args:
        data: the message.
        max_bytes: the largest size.
        source: the name of its source.

    >>> decode(b"hello")
    Traceback (most recent call last):
    ...
    spcl.errors.DataError: the message is no safetensors: Error while deserializing: header too small
    """
    if len(data) > max_bytes:
        raise too_large(len(data), max_bytes)
    try:
        return _decode(data, source)
    except SpclError as error:
        raise DataError(str(error)) from None
    except Exception as error:  # bytes from anywhere: whatever they cause, they are no reason to stop
        raise DataError(f"the message is no safetensors: {error!s:.200}") from None


def decode_inputs(data: bytes) -> Inputs:
    """Return inputs without targets, named as :func:`encode_batch` says; raise a :class:`DataError` if malformed.

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


def _encoded(tensors: dict[str, Tensor], content: str, announced: Announcement | None = None) -> bytes:
    """Return a message; equal content gives equal bytes, which safetensors does not promise for several metadata."""
    data = safetensors.torch.save(tensors, {CONTENT: content})
    if announced is None:
        return data
    text = json.dumps(announcement_to_json(announced))
    return _extended(data, f"{json.dumps(TASK)}:{json.dumps(text)},".encode())


def _extended(data: bytes, metadata: bytes) -> bytes:
    """Insert metadata at the beginning of the header."""
    metadata += b" " * (-len(metadata) % 8)  # tensors stay aligned
    length = int.from_bytes(data[:8], "little") + len(metadata)
    return length.to_bytes(8, "little") + OPENING + metadata + data[8 + len(OPENING) :]


def _decode(data: Data, source: str) -> Letter:
    start = 8 + int.from_bytes(data[:8], "little")
    layout = _layout if start <= CACHED_BYTES else _layout.__wrapped__
    header = bytes(data[:start])
    if match := SEQUENCE.match(header, 8):  # differs from message to message
        header = (start - 8 - len(match[1])).to_bytes(8, "little") + OPENING + header[match.end() :]
    letter, slots = layout(header, max(0, len(data) - start), source)
    if letter.content != "batch":
        return letter
    shared = data if isinstance(data, bytearray) else bytearray(data)
    return Letter("batch", _pair({name: slot.tensor(shared, start) for name, slot in slots.items()}), letter.announced)


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
def _layout(header: bytes, size: int, source: str) -> tuple[Letter, dict[str, _Slot]]:
    """Return what a message of a source with this header says, and where its tensors are in a body of that size.

    Messages of a source have the same header again and again: it is checked, by safetensors and as a batch, once.
    """
    tensors = safetensors.torch.load(header + bytes(size))
    entries = json.loads(header[8:])
    letter = _letter(entries.get("__metadata__", {}), source)
    if letter.content == "batch":
        as_batch(_pair(dict(tensors)))
    first = {name: entries[name]["data_offsets"][0] for name in tensors}
    return letter, {name: _Slot(first[name], leaf.dtype, leaf.shape) for name, leaf in tensors.items()}


def _letter(metadata: dict[str, Any], source: str) -> Letter:
    """Return what the metadata say, without the batch."""
    content = metadata.get(CONTENT, "batch")
    announced = _announced(source, metadata[TASK]) if TASK in metadata else None
    if content == "end":
        return Letter("end")
    if content == "start":
        if announced is None:
            raise DataError("the announcement does not say what the task is; send its kind and classes")
        return Letter("start", announced=announced)
    if content != "batch":
        raise DataError(f"the message says it is {content!r:.80}; send batch, start or end")
    return Letter("batch", announced=announced)


@lru_cache(maxsize=1024)
def _announced(source: str, text: str) -> Announcement:
    """Return the announcement that a message repeats, as one object, so that it is compared by one look."""
    return announcement_from_json(source, json.loads(text))


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
