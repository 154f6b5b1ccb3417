"""Runs that belong together: checks for duplicates, and filters by settings."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spcl.data.catalogue import PRESETS
from spcl.errors import SpclError, did_you_mean
from spcl.results.names import format_value
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.runs.settings import NAMED, decisive_settings, flat_settings, merge_settings, parse_assignments, split_values

# -- runs that stand for the same cell of a table


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


# -- filters by settings


MOST_VALUES = 20
THINGS = ("method", *NAMED)
"""Settings that give the name of a thing, or its name and options."""


def parse_conditions(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse conditions ``name=value`` or ``name=value,value,…``; the values of one name are alternatives.

    >>> parse_conditions(["method=soro,er", "method.sigma=1e2", "seed=0", "seed=1"])
    {'method.name': ['soro', 'er'], 'method.sigma': [100.0], 'seed': [0, 1]}
    """
    conditions: dict[str, list[Any]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        assignments = [f"{name}={value}" for value in split_values(values)] if separator else [text]
        for assignment in assignments:
            for flat, value in flat_settings(parse_assignments([assignment])).items():
                conditions.setdefault(flat, []).append(value)
    return conditions


def filter_runs(runs: Sequence[RunRecord], conditions: Mapping[str, Any]) -> list[RunRecord]:
    """Return the runs with the given settings, which may be nested as in ``settings.json`` or have dotted names.

    A list of values are alternatives. ``method`` is the method's name, in any case, ``optimizer`` that of the
    optimiser, and so on. An error names the settings and values that no run has.

    >>> from pathlib import Path
    >>> runs = [RunRecord(Path(), {"benchmark": "ps-glyphs", "seed": seed}, None) for seed in range(4)]
    >>> [run.seed for run in filter_runs(runs, {"seed": [1, 3]})]
    [1, 3]
    """
    chosen = list(runs)
    for name, value in flat_settings(conditions).items():
        wanted = value if isinstance(value, list) else [value]
        chosen = _filtered(chosen, f"{name}.name" if name in THINGS else name, wanted, len(runs))
    return chosen


def _filtered(runs: Sequence[RunRecord], name: str, wanted: Sequence[Any], total: int) -> list[RunRecord]:
    """Return the runs where the setting has one of these values; raise an error if any value is in no run."""
    settings = [flat_settings(merge_settings(run.settings)) | {"benchmark": run.benchmark} for run in runs]
    known = dict.fromkeys(key for flat in settings for key in flat)
    if runs and name not in known:
        raise SpclError(f"no run has a setting {name}; {_suggestion(name, map(_shown, known))}")
    present = [_comparable(name, flat[name]) if name in flat else None for flat in settings]
    for value in wanted:
        if runs and _comparable(name, value) not in present:
            among = f"none of {len(runs)} runs" if len(runs) == total else f"none of the {len(runs)} runs chosen so far"
            found = _listed(flat[name] for flat in settings if name in flat)
            raise SpclError(f"{among} has {_shown(name)}={format_value(value)}; there are {found}")
    accepted = [_comparable(name, value) for value in wanted]
    return [run for run, value, flat in zip(runs, present, settings, strict=True) if name in flat and value in accepted]


def _comparable(name: str, value: Any) -> Any:
    """Return names of methods in lower case, since tables and figures show display names."""
    return str(value).lower() if name == "method.name" else value


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Suggest a setting: the method's of that name, or the most similar one.

    >>> _suggestion("sigma", ["seed", "method.sigma"])
    "did you mean 'method.sigma'?"
    """
    names, of_method = list(known), f"method.{name}"
    return f"did you mean {of_method!r}?" if of_method in names else did_you_mean(name, names)


def _shown(name: str) -> str:
    thing = name.removesuffix(".name")
    return thing if thing in THINGS else name


def _listed(values: Iterable[Any]) -> str:
    """Return the different values, numbers in their order and then text.

    >>> _listed([10, "b", 2, "a", 10])
    '2, 10, a, b'
    """
    unique = {format_value(value): value for value in values}
    order = sorted(unique, key=lambda text: (isinstance(unique[text], str), _number(unique[text]), text))
    more = [f"{len(order) - MOST_VALUES} more"] if len(order) > MOST_VALUES else []
    return ", ".join([*order[:MOST_VALUES], *more])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
