"""Accuracy of runs that differ in one setting."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from spcl.results.figures.comparable import settings_key
from spcl.results.formatting import format_count
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.averages import expected_runs, mean_values, measure
from spcl.results.tables.table import Measure
from spcl.runs.identity import flat_settings

__all__ = ["SweepLine", "draw_points", "mean_accuracy", "runs_note", "sweep_lines"]


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
