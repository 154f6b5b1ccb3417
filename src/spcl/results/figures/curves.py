"""What figures draw: comparable runs, their curves over training, and accuracies over a setting."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from spcl.results.compare import Measure as StabilityMeasure
from spcl.results.names import format_count, method_order
from spcl.results.records import IDENTITY, CompleteRun, RunRecord, complete_runs, group_by
from spcl.results.tables import Measure, expected_runs, mean_values, measure
from spcl.runs.settings import decisive_settings, flat_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# -- comparable runs: those that differ only in what a figure compares


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


# -- curves over training steps


Array = NDArray[np.float64]
Curve = tuple[Array, Array]
"""Steps, and a value at each."""


class RunCurves:
    """The metrics of one run over time, read when first used."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run

    @cached_property
    def _entries(self) -> dict[str, list[dict[str, Any]]]:
        return group_by(self.run.metrics(), lambda entry: str(entry["kind"]))

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, in the order in which they start."""
        return list(self._entries["start"][0]["tasks"])

    @property
    def timeline(self) -> list[tuple[int, int]]:
        """The first and last step of each task."""
        return [(first, last) for first, last in self._entries["start"][0]["timeline"]]

    def stability(self, measure: StabilityMeasure, when: Literal["before", "after"]) -> Curve:
        """Return a measure of the gradients, before or after adjustment, at the steps with two gradients or more.

        NaN where the measure is infinite or unknown.
        """
        entries = [entry for entry in self._entries.get("step", []) if entry[when] is not None]
        values = [entry[when][measure] for entry in entries]
        return _steps(entries), np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def infinite_share(self) -> float:
        """Return the share of steps in which κ of the adjusted gradients is infinite, for a gradient of weight 0."""
        values = self.stability("condition_number", "after")[1]
        return float(np.isnan(values).mean()) if len(values) else 0.0

    def accuracy(self, task: str) -> Curve:
        """Return the accuracy of a task, in per cent, at the steps where it was evaluated."""
        entries = [entry for entry in self._entries.get("evaluation", []) if task in entry["accuracy"]]
        return _steps(entries), np.array([entry["accuracy"][task] for entry in entries], dtype=np.float64)

    def accuracy_at_ends(self) -> Array:
        """Return the average accuracy of the tasks seen at every end of a task; two that end together count twice."""
        return np.array(
            [
                float(np.mean(list(entry["accuracy"].values())))
                for entry in self._entries.get("evaluation", [])
                for _ in entry["ended"]
            ]
        )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean at every step of the curves that have a finite value there.

    >>> a, b = (np.array([0.0, 1.0]), np.array([2.0, 4.0])), (np.array([1.0]), np.array([6.0]))
    >>> mean_curve([a, b])
    (array([0., 1.]), array([2., 5.]))
    """
    points = [(steps[np.isfinite(values)], values[np.isfinite(values)]) for steps, values in curves]
    steps = np.concatenate([steps for steps, _ in points])
    values = np.concatenate([values for _, values in points])
    unique, index = np.unique(steps, return_inverse=True)
    return unique, np.bincount(index, values) / np.bincount(index)


def block_medians(curve: Curve, count: int) -> Curve:
    """Return at most ``count`` points: the mean step and the median value of as many equal parts of the curve.

    >>> block_medians((np.arange(6.0), np.array([1.0, 9.0, 2.0, 5.0, 5.0, 8.0])), 2)
    (array([1., 4.]), array([2., 5.]))
    """
    steps, values = (part[np.isfinite(curve[1])] for part in curve)
    if len(steps) <= count:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), count)
    return np.array([steps[part].mean() for part in parts]), np.array([np.median(values[part]) for part in parts])


def _steps(entries: Sequence[dict[str, Any]]) -> Array:
    return np.array([entry["step"] for entry in entries], dtype=np.float64)


# -- accuracies of runs that differ in one setting


@dataclass(frozen=True)
class SweepLine:
    """The runs for each value of one setting, complete or not, all other settings equal."""

    runs: Mapping[float, Sequence[RunRecord]]

    @property
    def first(self) -> CompleteRun:
        """The first complete run of the smallest value that has one."""
        return next(run for runs in self.runs.values() for run in complete_runs(runs))

    @property
    def records(self) -> list[RunRecord]:
        """All runs."""
        return [run for runs in self.runs.values() for run in runs]

    def points(self) -> dict[float, Measure]:
        """Return the mean accuracy, with its standard deviation over seeds, for each value with complete runs."""
        return {
            value: mean_accuracy(complete) for value, runs in self.runs.items() if (complete := complete_runs(runs))
        }


def sweep_lines(records: Sequence[RunRecord], name: str) -> list[SweepLine]:
    """Return the groups of runs that differ only in this setting (and in seed and configuration), the largest first.

    Each group has complete runs for two values of the setting or more; values are in ascending order.
    """
    lines = []
    candidates = [run for run in records if _value(run, name) is not None]
    for group in group_by(candidates, lambda run: settings_key(run, name, "seed", "config")).values():
        by_value = group_by(group, lambda run: float(_value(run, name)))
        line = SweepLine({value: by_value[value] for value in sorted(by_value)})
        if len(line.points()) > 1:
            lines.append(line)
    return sorted(lines, key=lambda line: -len(line.points()))


def mean_accuracy(runs: Iterable[CompleteRun]) -> Measure:
    """Return the mean over seeds of the mean over configurations, and the standard deviation over seeds."""
    return measure(mean_values(runs, "accuracy"), "seeds")


def draw_points(axes: Axes, points: Mapping[float, Measure], **style: Any) -> None:
    """Draw means by their horizontal position, with bars of the standard deviation where there are several seeds."""
    means = [point.mean for point in points.values()]
    deviations = [np.nan if point.std is None else point.std for point in points.values()]
    bars = None if np.isnan(deviations).all() else deviations
    axes.errorbar(list(points), means, bars, capsize=2.5, **style)


def runs_note(records: Iterable[RunRecord]) -> str:
    """Return the part of a caption about the runs of all points of a figure: their seeds, and how many are missing.

    As in a table, every point is expected to have all configurations and seeds among these runs.
    """
    runs = list(records)
    points = group_by(runs, lambda run: settings_key(run, "seed", "config")).values()
    found = [{(run.config, run.seed) for run in complete_runs(group)} for group in points]
    seeds = [len({seed for _, seed in keys}) for keys in found if keys]
    missing = expected_runs(runs) * len(found) - sum(map(len, found))
    return f"{_seeds_note(seeds)}.{_missing_note(missing)}"


def _seeds_note(seeds: Sequence[int]) -> str:
    """Return what a point with these numbers of seeds shows.

    >>> _seeds_note([1, 1]), _seeds_note([3, 3])
    ('one seed', 'mean and standard deviation over 3 seeds')
    >>> _seeds_note([1, 3])
    'mean over 1 to 3 seeds, with the standard deviation where there are several'
    """
    if max(seeds) == 1:
        return "one seed"
    if min(seeds) == 1:
        return f"mean over {format_count(seeds, 'seed')}, with the standard deviation where there are several"
    return f"mean and standard deviation over {format_count(seeds, 'seed')}"


def _missing_note(missing: int) -> str:
    """Return the sentence about missing runs; empty if none are.

    >>> _missing_note(1)
    ' 1 run is missing.'
    """
    return f" {format_count([missing], 'run')} {'is' if missing == 1 else 'are'} missing." if missing else ""


def _value(run: RunRecord, name: str) -> Any:
    return flat_settings(run.settings).get(name)
