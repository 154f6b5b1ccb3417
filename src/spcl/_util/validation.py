"""Validation of settings, with errors that name every wrong value."""

from collections.abc import Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import numpy as np

from spcl.errors import CheckpointError, SpclError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

S = TypeVar("S", bound="BaseModel")


def validated(model: type[S], values: Any, owner: str) -> S:
    """Return the settings, or raise one SpclError that lists every wrong value and suggests known names.

    Args:
        model: the class of the settings.
        values: its fields by name, or anything else, which is an error, too.
        owner: whose settings they are; the error begins with it.

    >>> from pydantic import BaseModel
    >>> class Settings(BaseModel, extra="forbid"):
    ...     rate: float
    >>> validated(Settings, {"rate": "fast", "rata": 1}, "method 'x'")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: method 'x': rate = 'fast': Input should be a valid number, unable to parse string as a
    number; there is no setting 'rata'; did you mean 'rate'?
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SpclError(f"{owner}: " + "; ".join(_explanation(model, detail) for detail in error.errors())) from None


def check_seed(seed: object, error: type[SpclError] = SpclError) -> None:
    """Raise an error unless a seed is a whole number from 0.

    >>> check_seed("x")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: seed is 'x'; give a whole number from 0
    """
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        shown = f"{seed!r:.80}" if seed is None or isinstance(seed, int | float | str) else f"a {type(seed).__name__}"
        raise error(f"seed is {shown}; give a whole number from 0")


DICTS: Any = list[dict]  # type: ignore[type-arg]
"""The kind of a list of dicts, for :func:`check_content`."""


def check_content(part: str, content: Any, kinds: Mapping[str, Any]) -> None:
    """Raise an error unless a part of a checkpoint is a dict with these keys, and every value is of its kind.

    Args:
        part: what the content is of; the error says it.
        content: of the checkpoint.
        kinds: by key a type, ``list[…]``, ``dict[…, …]`` or a union of them; ``int`` stands for whole numbers from 0.

    >>> check_content("the stream", {"step": -2, "ended": []}, {"ended": list[str], "step": int})
    Traceback (most recent call last):
    ...
    spcl.errors.CheckpointError: step of the stream is -2 in the checkpoint, not a whole number from 0; use another
    checkpoint
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{part} is {_shown(content)} in the checkpoint, not a dict; use another checkpoint")
    for name, kind in kinds.items():
        if name not in content:
            raise CheckpointError(f"{part} has no {name} in the checkpoint; use another checkpoint")
        if not _is_of_kind(content[name], kind):
            wanted = "a whole number from 0" if kind is int else kind.__name__ if isinstance(kind, type) else kind
            raise CheckpointError(
                f"{name} of {part} is {_shown(content[name])} in the checkpoint, not {wanted}; use another checkpoint"
            )


def _shown(value: Any) -> str:
    return " ".join(f"{value!r:.80}".split())


def _is_of_kind(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_is_of_kind(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list | tuple) and all(_is_of_kind(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(
            _is_of_kind(key, inner[0]) and _is_of_kind(each, inner[1]) for key, each in value.items()
        )
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, Mapping if kind is dict else kind)


def setting(default: Any, description: str, *tags: str, **bounds: Any) -> Any:
    """Declare a setting: a field of a model with its meaning, tags of :mod:`spcl.options`, and bounds."""
    from pydantic import Field

    return Field(default, description=description, json_schema_extra={"tags": list(tags)}, **bounds)


def tagged(model: "type[BaseModel]", *tags: str) -> tuple[str, ...]:
    """Return the names of the settings that have any of these tags.

    >>> from pydantic import BaseModel
    >>> class Settings(BaseModel):
    ...     rate: float = setting(0.1, "how fast", "speed")
    ...     name: str = setting("x", "what it is called")
    >>> tagged(Settings, "speed", "record")
    ('rate',)
    """
    found = {name: (field.json_schema_extra or {}) for name, field in model.model_fields.items()}
    return tuple(name for name, extra in found.items() if isinstance(extra, dict) and set(tags) & {*_tags(extra)})


def _tags(extra: Mapping[str, Any]) -> list[str]:
    return list(extra.get("tags", ()))


def _explanation(model: "type[BaseModel]", detail: Any) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if not name:
        return str(detail["msg"])
    if detail["type"] == "missing":
        return f"{name} must be given"
    if detail["type"] == "extra_forbidden":
        return f"there is no setting {name!r}; {did_you_mean(name, sorted(model.model_fields))}"
    return f"{name} = {detail['input']!r}: {detail['msg']}"
