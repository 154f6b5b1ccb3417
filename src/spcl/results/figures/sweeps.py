"""Runs that differ in one setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spcl.results.figures.comparable import identity
from spcl.results.figures.curves import grouped
from spcl.results.records import RunRecord
from spcl.runs.identity import flat_settings

__all__ = ["SweepLine", "mean_accuracy", "sweep_lines"]


@dataclass(frozen=True)
class SweepLine:
    """Accuracy against one setting, all others equal: for each value the mean over runs and their spread."""

    runs: Mapping[float, Sequence[RunRecord]]

    @property
    def first(self) -> RunRecord:
        """One of the runs."""
        return next(iter(self.runs.values()))[0]

    def points(self) -> tuple[list[float], list[float], list[float]]:
        """Values, mean accuracies, standard deviations over seeds."""
        means, deviations = zip(*(mean_accuracy(runs) for runs in self.runs.values()), strict=True)
        return list(self.runs), list(means), list(deviations)


def sweep_lines(runs: Sequence[RunRecord], name: str) -> list[SweepLine]:
    """The groups of runs that differ only in this setting (and in seed and configuration), the largest first.

    The setting must have two values at least; those of a group are in ascending order.
    """
    lines = []
    candidates = [run for run in runs if _value(run, name) is not None]
    for cell in grouped(candidates, lambda run: identity(run, name, "seed", "config")).values():
        by_value = grouped(cell, lambda run: float(_value(run, name)))
        if len(by_value) > 1:
            lines.append(SweepLine({value: by_value[value] for value in sorted(by_value)}))
    return sorted(lines, key=lambda line: -len(line.runs))


def mean_accuracy(runs: Sequence[RunRecord]) -> tuple[float, float]:
    """The mean over seeds of the mean over configurations, and the standard deviation over seeds."""
    seeds = [np.mean([(run.result or {})["accuracy"] for run in group]) for group in grouped(runs, _seed).values()]
    return float(np.mean(seeds)), float(np.std(seeds, ddof=1)) if len(seeds) > 1 else 0.0


def _seed(run: RunRecord) -> int:
    return run.seed


def _value(run: RunRecord, name: str) -> Any:
    return flat_settings(run.settings).get(name)
