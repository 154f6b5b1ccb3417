"""Selection of comparable runs: runs that differ only in what a figure compares."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord
from spcl.results.tables.methods import method_order
from spcl.results.variants import IDENTITY
from spcl.runs.identity import decisive_settings

__all__ = ["NOT_SHOWN", "comparable_runs", "not_shown_note", "settings_key", "setup_key"]

MOST_NAMED = 4
NOT_SHOWN = "Not shown, as their settings differ"

Key = tuple[tuple[str, str], ...]


def settings_key(run: RunRecord, *ignored: str) -> Key:
    """Return all settings that decide a run, apart from those ignored.

    >>> from pathlib import Path
    >>> settings_key(RunRecord(Path(), {"seed": 0, "gap": 1, "method": {"name": "er"}}, None), "seed")
    (('gap', '1'), ('method.name', "'er'"))
    """
    decisive = decisive_settings(run.settings)
    return tuple((name, repr(value)) for name, value in sorted(decisive.items()) if name not in ignored)


def setup_key(run: RunRecord, *ignored: str) -> Key:
    """Return the settings that decide a run, apart from its method and those ignored."""
    return tuple((name, value) for name, value in settings_key(run, *ignored) if not name.startswith("method."))


def comparable_runs(runs: Sequence[CompleteRun], *ignored: str) -> dict[str, list[CompleteRun]]:
    """Return runs with the same setup, by method in the order of the paper's tables.

    The setup is that in which most methods were run; of several variants of a method, the one with most runs is taken.
    The ignored settings may differ.
    """
    groups = group_by(runs, lambda run: setup_key(run, *ignored)).values()
    largest = max(groups, key=lambda group: (len({run.recipe for run in group}), len(group)), default=[])
    methods = group_by(sorted(largest, key=lambda run: method_order(run.recipe)), lambda run: run.recipe)
    return {method: _largest(group, lambda run: settings_key(run, *ignored)) for method, group in methods.items()}


def not_shown_note(runs: Sequence[CompleteRun], shown: Iterable[Mapping[str, Sequence[CompleteRun]]]) -> str:
    """Return the sentence of a caption that names the runs which are not shown; empty if there are none."""
    chosen = {run.path: run for groups in shown for group in groups.values() for run in group}
    others = sorted({_difference(run, chosen.values()) for run in runs if run.path not in chosen})
    if not others:
        return ""
    named = ", ".join([*others[:MOST_NAMED], *([f"{len(others) - MOST_NAMED} more"] if others[MOST_NAMED:] else [])])
    return f" {NOT_SHOWN}: {named}."


def _difference(run: CompleteRun, shown: Iterable[CompleteRun]) -> str:
    """Return the method of a run with the settings that tell it from those shown beside it, and its scenario."""
    beside = [other for other in shown if (other.benchmark, other.scenario) == (run.benchmark, run.scenario)]
    nearest = max(beside, key=lambda other: other.recipe == run.recipe)
    known = decisive_settings(nearest.settings)
    own = {name: value for name, value in decisive_settings(run.settings).items() if name not in IDENTITY}
    variant = {name: value for name, value in own.items() if known.get(name, value) != value}
    return f"{replace(run, variant=variant).label} {run.scenario}-incrementally"


def _largest(runs: Iterable[CompleteRun], key: Callable[[CompleteRun], Hashable]) -> list[CompleteRun]:
    return max(group_by(runs, key).values(), key=len)
