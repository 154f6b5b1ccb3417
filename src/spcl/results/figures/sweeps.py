"""Accuracy of runs that differ in one setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spcl.results.figures.comparable import settings_key
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord
from spcl.runs.identity import flat_settings

__all__ = ["SweepLine", "mean_accuracy", "sweep_lines"]


@dataclass(frozen=True)
class SweepLine:
    """The runs for each value of one setting, all other settings equal."""

    runs: Mapping[float, Sequence[CompleteRun]]

    @property
    def first(self) -> CompleteRun:
        """The first run of the smallest value."""
        return next(iter(self.runs.values()))[0]

    def points(self) -> tuple[list[float], list[float], list[float]]:
        """Return values, mean accuracies and standard deviations over seeds."""
        means, deviations = zip(*(mean_accuracy(runs) for runs in self.runs.values()), strict=True)
        return list(self.runs), list(means), list(deviations)


def sweep_lines(runs: Sequence[CompleteRun], name: str) -> list[SweepLine]:
    """Return the groups of runs that differ only in this setting (and in seed and configuration), the largest first.

    Each group has two values of the setting or more, in ascending order.
    """
    lines = []
    candidates = [run for run in runs if _value(run, name) is not None]
    for group in group_by(candidates, lambda run: settings_key(run, name, "seed", "config")).values():
        by_value = group_by(group, lambda run: float(_value(run, name)))
        if len(by_value) > 1:
            lines.append(SweepLine({value: by_value[value] for value in sorted(by_value)}))
    return sorted(lines, key=lambda line: -len(line.runs))


def mean_accuracy(runs: Sequence[CompleteRun]) -> tuple[float, float]:
    """Return the mean over seeds of the mean over configurations, and the standard deviation over seeds."""
    by_seed = group_by(runs, lambda run: run.seed).values()
    means = [np.mean([run.result.accuracy for run in group]) for group in by_seed]
    return float(np.mean(means)), float(np.std(means, ddof=1)) if len(means) > 1 else 0.0


def _value(run: RunRecord, name: str) -> Any:
    return flat_settings(run.settings).get(name)
