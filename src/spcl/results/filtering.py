"""Filtering of runs by their settings."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spcl.errors import SpclError
from spcl.results.formatting import format_value
from spcl.results.records import RunRecord
from spcl.runs.identity import flat_settings
from spcl.runs.settings import NAMED, merge_settings, parse_assignments, split_values
from spcl.suggestions import did_you_mean

__all__ = ["filter_runs", "parse_conditions"]

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
