"""Detection of runs that stand for the same cell of a table."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spcl.data.presets import PRESETS
from spcl.errors import SpclError
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.runs.identity import decisive_settings

__all__ = ["check_duplicates"]


def check_duplicates(records: Iterable[RunRecord]) -> None:
    """Raise an error if complete runs have the same label, configuration and seed, or custom data the same name.

    Runs with equal settings in several sweeps of one grid (or trials of one search) are allowed: the sweeps have this
    point in common. Custom data of one name is allowed where it is the same data.
    """
    complete = complete_runs(records)
    _check_custom_data(complete)
    known: dict[tuple[Any, ...], CompleteRun] = {}
    for run in complete:
        other = known.setdefault(_key(run), run)
        if not _is_same_folder(run, other) and not _is_shared_by_sweeps(run, other):
            raise _duplicate_error(other, run)


def _key(run: RunRecord) -> tuple[str, str, str, int, int]:
    return run.benchmark, run.scenario, run.label, run.config, run.seed


def _check_custom_data(runs: Iterable[CompleteRun]) -> None:
    """Raise an error if files of the same name hold different data."""
    known: dict[tuple[str, Any], CompleteRun] = {}
    for run in runs:
        if run.settings["benchmark"] in PRESETS:
            continue
        other = known.setdefault((run.benchmark, run.settings.get("validation")), run)
        if not _has_same_data(other, run):
            raise SpclError(
                f"the data of {other.path} and {run.path} have the same name {run.benchmark!r}, but differ: "
                f"{_describe_data(other)} and {_describe_data(run)}; use the runs of each by themselves"
            )


def _has_same_data(one: CompleteRun, other: CompleteRun) -> bool:
    """Compare sizes and checksums where both runs have recorded them."""
    pairs = ((one.result.data, other.result.data), (one.result.fingerprint, other.result.fingerprint))
    return all(first == second or None in (first, second) for first, second in pairs)


def _describe_data(run: CompleteRun) -> str:
    parts = (run.result.data, run.result.fingerprint)
    return ", checksum ".join(str(part) for part in parts if part is not None)


def _is_same_folder(one: RunRecord, other: RunRecord) -> bool:
    return one is other or one.path.resolve() == other.path.resolve()


def _is_shared_by_sweeps(one: RunRecord, other: RunRecord) -> bool:
    return _path_without_sweep(one.path) == _path_without_sweep(other.path) and (
        decisive_settings(one.settings) == decisive_settings(other.settings)
    )


def _path_without_sweep(path: Path) -> tuple[str, ...]:
    """Return the parts of a path that name neither a swept value nor a trial.

    >>> _path_without_sweep(Path("/x/task/soro/sigma=10/config-0/seed-0"))
    ('/', 'x', 'task', 'soro', 'config-0', 'seed-0')
    """
    return tuple(part for part in path.resolve().parts if "=" not in part and not re.fullmatch(r"trial-\d+", part))


def _duplicate_error(one: RunRecord, other: RunRecord) -> SpclError:
    first, second = _differing_folders(one.path, other.path)
    benchmarks = dict.fromkeys(str(record.settings["benchmark"]) for record in (one, other))
    return SpclError(
        f"{first} and {second} both hold a run of {one.label} on {' and '.join(benchmarks)}, "
        f"{one.scenario}-incremental, configuration {one.config}, seed {one.seed}, and no setting distinguishes them; "
        "use only one of these folders"
    )


def _differing_folders(one: Path, other: Path) -> tuple[Path, Path]:
    """Return the paths without their common ending, or whole where one would then contain the other.

    >>> [str(path) for path in _differing_folders(Path("a/er/seed-0"), Path("b/er/seed-0"))]
    ['a', 'b']
    """
    first, second = one, other
    while first.name and first.name == second.name:
        first, second = first.parent, second.parent
    nested = first.is_relative_to(second) or second.is_relative_to(first)
    return (one, other) if nested else (first, second)
