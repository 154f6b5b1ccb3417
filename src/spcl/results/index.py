"""Settings and results of the runs in a folder, cached in its ``index.json``."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from spcl.files import read_json, write_text
from spcl.runs import RunFolder
from spcl.runs.result import RunResult

__all__ = ["IndexEntry", "read_folder"]

INDEX = "index.json"
REQUIRED = frozenset({"benchmark", "config", "method", "paradigm", "preset", "scenario", "seed"})


def _check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    if not settings.keys() >= REQUIRED or not isinstance(settings["method"], dict) or "name" not in settings["method"]:
        raise ValueError(f"settings need {', '.join(sorted(REQUIRED))}, and the method a name")
    return settings


class IndexEntry(BaseModel):
    """A run: the stamp of its files, its settings, and its result without confusion tables and class names."""

    model_config = ConfigDict(frozen=True)

    stamp: tuple[int, ...]
    settings: Annotated[dict[str, Any], AfterValidator(_check_settings)]
    result: RunResult | None


class _Index(BaseModel):
    version: Literal[2]
    runs: dict[str, IndexEntry]


def read_folder(folder: Path) -> dict[Path, IndexEntry]:
    """Return the runs in a folder and the folders below.

    An entry of the index is used only while size and time of the run's files are those it was made from, so the index
    may be deleted, damaged or out of date. Runs whose settings cannot be read are skipped with a warning.
    """
    known = _read_index(folder)
    found: dict[str, IndexEntry] = {}
    for run in _run_folders(folder):
        name = str(run.relative_to(folder))
        stamp = _stamp(run)
        entry = known.get(name)
        if entry is None or entry.stamp != stamp:
            entry = _read_run(run, stamp)
        if entry is not None:
            found[name] = entry
    if found != known and "." not in found:
        _write_index(folder, found)
    return {folder / name: entry for name, entry in found.items()}


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders with a ``settings.json``, but none below them."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if RunFolder(Path(path)).settings.name in files:
            folders.clear()
            yield Path(path)


def _stamp(run: Path) -> tuple[int, ...]:
    """Return size and time of the run's files."""
    stamp: list[int] = []
    for path in (RunFolder(run).settings, RunFolder(run).result):
        try:
            status = path.stat()
            stamp += [status.st_size, status.st_mtime_ns]
        except FileNotFoundError:
            stamp += [0, 0]
    return tuple(stamp)


def _read_run(run: Path, stamp: tuple[int, ...]) -> IndexEntry | None:
    folder = RunFolder(run)
    result = folder.read_result()
    if result is not None:
        result = result.model_copy(update={"confusion": {}, "class_names": {}})
    try:
        return IndexEntry(stamp=stamp, settings=read_json(folder.settings), result=result)
    except ValueError:
        warnings.warn(f"{folder.settings} cannot be read; the run is skipped", stacklevel=2)
        return None


def _read_index(folder: Path) -> dict[str, IndexEntry]:
    """Return the entries of the index; none if it is missing, damaged or of another version."""
    try:
        return _Index.model_validate_json((folder / INDEX).read_bytes()).runs
    except (OSError, ValueError):
        return {}


def _write_index(folder: Path, entries: Mapping[str, IndexEntry]) -> None:
    """Write the index if the folder is writable; reading does not depend on it."""
    content = _Index(version=2, runs=dict(entries)).model_dump(exclude_defaults=True)
    with suppress(OSError):  # pydantic itself would write infinite values as null
        write_text(folder / INDEX, json.dumps(content, ensure_ascii=False, separators=(",", ":")))
