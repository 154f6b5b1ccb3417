"""Whether a folder holds the run that is asked for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spcl.errors import SpclError
from spcl.runs.identity import decisive_settings
from spcl.runs.record import RunFolder
from spcl.runs.settings import RunSettings

__all__ = ["check_folder", "first_difference", "recorded_settings"]


def recorded_settings(out: Path) -> dict[str, Any] | None:
    """The settings that a run folder holds; None if there are none or they cannot be read."""
    try:
        content = json.loads(RunFolder(out).settings.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_folder(out: Path, settings: RunSettings) -> None:
    """Raise an error if the folder holds a run with other settings."""
    if found := first_difference(recorded_settings(out) or {}, settings.model_dump(mode="json")):
        name, recorded, asked = found
        raise SpclError(
            f"{out} holds a run with {name} = {recorded}, but {asked} is asked for; "
            f"choose another --out, or remove that folder"
        )


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """A setting that makes two runs different ones, by dotted name, and its two values; None if there is none.

    >>> first_difference({"seed": 0, "method": {"name": "er"}}, {"seed": 0, "method": {"name": "soro"}})
    ('method.name', 'er', 'soro')
    >>> first_difference({"device": "cpu", "protocol": "/here/a.json"}, {"device": "cuda", "protocol": "/there/a.json"})
    """
    first, second = decisive_settings(one), decisive_settings(other)
    for name in second:
        if name in first and first[name] != second[name]:
            return name, first[name], second[name]
    return None
