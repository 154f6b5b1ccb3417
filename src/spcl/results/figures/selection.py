"""Choosing runs by their settings."""

from collections.abc import Sequence

from spcl.errors import SpclError
from spcl.results.records import RunRecord
from spcl.runs.identity import flat_settings
from spcl.runs.settings import parse_assignments

__all__ = ["select_runs"]


def select_runs(runs: Sequence[RunRecord], conditions: Sequence[str]) -> list[RunRecord]:
    """The runs whose settings are all as in the conditions, which are written like ``method.name=soro``.

    >>> from pathlib import Path
    >>> runs = [RunRecord(Path(), {"benchmark": "ps-glyphs", "seed": seed}, None) for seed in range(3)]
    >>> [run.seed for run in select_runs(runs, ["seed=1"])]
    [1]
    """
    wanted = flat_settings(parse_assignments(conditions))
    chosen = []
    for run in runs:
        settings = flat_settings(run.settings) | {"benchmark": run.benchmark}
        if all(name in settings and settings[name] == value for name, value in wanted.items()):
            chosen.append(run)
    if runs and not chosen:
        known = {name for run in runs for name in flat_settings(run.settings)}
        unknown = sorted(wanted.keys() - known)
        hint = f"; no run has a setting {', '.join(unknown)}" if unknown else ""
        raise SpclError(f"none of {len(runs)} runs has {' and '.join(conditions)}{hint}")
    return chosen
