"""Protocols in the YAML files that the paper's authors published."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from spcl.data import Protocol
from spcl.errors import DataError, SpclError
from spcl.plugins import protocol_format
from spcl.streams import LabelSet, Timeline


class _Entry(BaseModel, strict=True):
    """A label set, and its timelines by number: the first and last step of each task, inclusive."""

    label_set: list[list[int]] = Field(alias="LabelSet", min_length=1)
    timelines: dict[int, list[list[int]]] = Field(alias="TimeLines", min_length=1)


_FILE = TypeAdapter(dict[int, _Entry])


@protocol_format("paper")
def read_published_protocol(path: str | Path, benchmark: str, batch_size: int) -> Protocol:
    """Read a protocol from YAML as published; a `DataError` names the file and the invalid entry.

    The file maps the number of each label set to ``LabelSet``, the classes of each task, and ``TimeLines``, which maps
    the number of each timeline to the first and last step of each task. It names neither benchmark nor batch size.
    """
    entries = _read(path)
    try:
        label_sets: tuple[LabelSet, ...] = tuple(tuple(map(tuple, entry.label_set)) for entry in entries)
        timelines = tuple(tuple(map(_timeline, entry.timelines.values())) for entry in entries)
        classes = sum(map(len, label_sets[0]))
        return Protocol(benchmark, batch_size, classes, label_sets, timelines)
    except SpclError as error:
        raise DataError(f"the protocol {path} is not valid: {error}") from error


def _timeline(spans: list[list[int]]) -> Timeline:
    for task, span in enumerate(spans):
        if len(span) != 2:
            raise DataError(f"task {task} has the span {span}; give its first and last step")
    return Timeline(tuple((first, last) for first, last in spans))


def _read(path: str | Path) -> list[_Entry]:
    try:
        content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the protocol {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"the protocol {path} is not YAML; download the authors' file again") from error
    try:
        entries = list(_FILE.validate_python(content).values())
    except ValidationError as error:
        first = error.errors()[0]
        entry = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            f"the protocol {path} is not valid at {entry}: {first['msg']}; expected LabelSet and TimeLines for each "
            "label set, as in the authors' files"
        ) from error
    if not entries:
        raise DataError(f"the protocol {path} has no label set; download the authors' file again")
    return entries
