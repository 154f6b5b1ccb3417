"""Filtering of runs by their settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from spcl.errors import SpclError
from spcl.results.records import RunRecord
from spcl.runs.identity import flat_settings
from spcl.suggestions import did_you_mean

__all__ = ["filter_runs"]


def filter_runs(runs: Sequence[RunRecord], conditions: Mapping[str, Any]) -> list[RunRecord]:
    """Return the runs with the given settings, which may be nested as in ``settings.json`` or have dotted names.

    >>> from pathlib import Path
    >>> runs = [RunRecord(Path(), {"benchmark": "ps-glyphs", "seed": seed}, None) for seed in range(3)]
    >>> [run.seed for run in filter_runs(runs, {"seed": 1})]
    [1]
    """
    wanted = flat_settings(conditions)
    chosen = []
    for run in runs:
        settings = flat_settings(run.settings) | {"benchmark": run.benchmark}
        if all(name in settings and settings[name] == value for name, value in wanted.items()):
            chosen.append(run)
    if runs and not chosen:
        known = sorted({name for run in runs for name in flat_settings(run.settings)})
        unknown = sorted(wanted.keys() - set(known))
        hint = f"; no run has a setting {unknown[0]}, {did_you_mean(unknown[0], known)}" if unknown else ""
        expected = " and ".join(f"{name}={value}" for name, value in wanted.items())
        raise SpclError(f"none of {len(runs)} runs has {expected}{hint}")
    return chosen
