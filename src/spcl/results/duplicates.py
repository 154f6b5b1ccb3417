"""Runs that stand for the same: where several are there, nobody could say which of them a table shows."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spcl.data.presets import PRESETS
from spcl.errors import SpclError
from spcl.results.records import RunRecord
from spcl.runs.identity import decisive_settings

__all__ = ["check_duplicates"]


def check_duplicates(records: Iterable[RunRecord]) -> None:
    """Raise an error if complete runs cannot be told apart, or if own data of one name is not the same data.

    Runs with equal settings that several sweeps of one grid (or trials of one search) have in common may be there more
    than once: they are what was asked for.
    """
    complete = [record for record in records if record.result is not None]
    _check_data(complete)
    known: dict[tuple[Any, ...], RunRecord] = {}
    for record in complete:
        other = known.setdefault(_key(record), record)
        if not _is_same_run(record, other) and not _is_asked_for(record, other):
            raise _told_twice(other, record)


def _key(record: RunRecord) -> tuple[str, str, str, int, int]:
    return record.benchmark, record.scenario, record.label, record.config, record.seed


def _check_data(records: Iterable[RunRecord]) -> None:
    """Own data is called by the name of its file, which others may share."""
    known: dict[tuple[str, Any], RunRecord] = {}
    for record in records:
        if record.settings["benchmark"] in PRESETS:
            continue
        other = known.setdefault((record.benchmark, record.settings.get("validation")), record)
        if not _is_same_data(other, record):
            raise SpclError(
                f"the data of {other.path} and {record.path} are both called {record.benchmark!r}, but they are not "
                f"the same: {_shown(other)} and {_shown(record)}; look at each of them by itself"
            )


def _is_same_data(one: RunRecord, other: RunRecord) -> bool:
    """By what it looks like and, where both runs have noted it, by its checksum."""
    return all(mine == theirs or None in (mine, theirs) for mine, theirs in zip(_data(one), _data(other), strict=True))


def _data(record: RunRecord) -> tuple[Any, Any]:
    result = record.result or {}
    return result.get("data"), result.get("fingerprint")


def _shown(record: RunRecord) -> str:
    return ", checksum ".join(str(part) for part in _data(record) if part is not None)


def _is_same_run(one: RunRecord, other: RunRecord) -> bool:
    return one is other or one.path.resolve() == other.path.resolve()


def _is_asked_for(one: RunRecord, other: RunRecord) -> bool:
    return _outside_sweeps(one.path) == _outside_sweeps(other.path) and (
        decisive_settings(one.settings) == decisive_settings(other.settings)
    )


def _outside_sweeps(path: Path) -> tuple[str, ...]:
    """
    >>> _outside_sweeps(Path("/x/task/soro/sigma=10/config-0/seed-0"))
    ('/', 'x', 'task', 'soro', 'config-0', 'seed-0')
    """
    return tuple(part for part in path.resolve().parts if "=" not in part and not re.fullmatch(r"trial-\d+", part))


def _told_twice(one: RunRecord, other: RunRecord) -> SpclError:
    first, second = _differing_folders(one.path, other.path)
    benchmarks = dict.fromkeys(str(record.settings["benchmark"]) for record in (one, other))
    return SpclError(
        f"{first} and {second} both hold a run of {one.label} on {' and '.join(benchmarks)}, "
        f"{one.scenario}-incremental, configuration {one.config}, seed {one.seed}, and nothing tells the two apart; "
        "give only one of these folders, or look at each by itself"
    )


def _differing_folders(one: Path, other: Path) -> tuple[Path, Path]:
    """The folders without what their paths end in alike, unless one would then hold the other.

    >>> [str(path) for path in _differing_folders(Path("a/er/seed-0"), Path("b/er/seed-0"))]
    ['a', 'b']
    """
    first, second = one, other
    while first.name and first.name == second.name:
        first, second = first.parent, second.parent
    nested = first.is_relative_to(second) or second.is_relative_to(first)
    return (one, other) if nested else (first, second)
