"""Whether a folder holds the run that is asked for."""

import json
from pathlib import Path
from typing import Any

from spcl.errors import SpclError
from spcl.experiments.index import BOOKKEEPING, flat_settings
from spcl.experiments.record import RunFolder
from spcl.experiments.settings import RunSettings

__all__ = ["check_folder", "recorded_settings"]


def recorded_settings(out: Path) -> dict[str, Any] | None:
    """The settings that a run folder holds; None if there are none or they cannot be read."""
    try:
        content = json.loads(RunFolder(out).settings.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_folder(out: Path, settings: RunSettings) -> None:
    """Raise an error if the folder holds a run with other settings."""
    recorded = flat_settings(recorded_settings(out) or {})
    for name, value in flat_settings(settings.model_dump(mode="json")).items():
        if name not in recorded or name in BOOKKEEPING:
            continue
        if _comparable(name, recorded[name]) != _comparable(name, value):
            raise SpclError(
                f"{out} holds a run with {name} = {recorded[name]}, but {value} is asked for; "
                f"choose another --out, or remove that folder"
            )


def _comparable(name: str, value: Any) -> Any:
    """Files may be moved: of their paths only the name counts."""
    return Path(value).name if name in {"benchmark", "protocol"} and isinstance(value, str) else value
