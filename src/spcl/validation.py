"""Validation of settings, with errors that name every wrong value."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from spcl.errors import SpclError
from spcl.suggestions import did_you_mean

__all__ = ["validated"]

S = TypeVar("S", bound=BaseModel)


def validated(model: type[S], values: Any, owner: str) -> S:
    """Return the settings, or raise one SpclError that lists every wrong value and suggests known names.

    Args:
        model: the class of the settings.
        values: its fields by name, or anything else, which is an error, too.
        owner: whose settings they are; the error begins with it.

    >>> class Settings(BaseModel, extra="forbid"):
    ...     rate: float
    >>> validated(Settings, {"rate": "fast", "rata": 1}, "method 'x'")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: method 'x': rate = 'fast': Input should be a valid number, unable to parse string as a
    number; there is no setting 'rata'; did you mean 'rate'?
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SpclError(f"{owner}: " + "; ".join(_explanation(model, detail) for detail in error.errors())) from None


def _explanation(model: type[BaseModel], detail: Any) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if not name:
        return str(detail["msg"])
    if detail["type"] == "missing":
        return f"{name} must be given"
    if detail["type"] == "extra_forbidden":
        return f"there is no setting {name!r}; {did_you_mean(name, sorted(model.model_fields))}"
    return f"{name} = {detail['input']!r}: {detail['msg']}"
