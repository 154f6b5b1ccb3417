"""Means over runs by configuration and seed, and how many runs are missing."""

from collections.abc import Iterable, Mapping

import numpy as np

from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord
from spcl.results.tables.table import Measure, Over

__all__ = ["Values", "expected_runs", "mean_values", "measure", "median_step_time"]

Values = Mapping[tuple[int, int], float]
"""A number of every complete run, by configuration and seed."""


def expected_runs(records: Iterable[RunRecord]) -> int:
    """Return the number of runs that each method needs to have all configurations and seeds among the records."""
    keys = {(record.config, record.seed) for record in records}
    return len({config for config, _ in keys}) * len({seed for _, seed in keys})


def mean_values(runs: Iterable[CompleteRun], name: str) -> Values:
    """Return ``accuracy`` or ``forgetting`` by configuration and seed; runs that share both count with their mean."""
    groups = group_by(runs, lambda run: (run.config, run.seed))
    return {key: float(np.mean([getattr(run.result, name) for run in group])) for key, group in groups.items()}


def median_step_time(runs: Iterable[CompleteRun]) -> float | None:
    """Return the median over runs of the milliseconds of a training step; None if no run has recorded its time."""
    recorded = [(run.result.seconds.get("training"), run.result.steps) for run in runs]
    times = [1e3 * seconds / steps for seconds, steps in recorded if seconds is not None and steps]
    return float(np.median(times)) if times else None


def measure(values: Values, over: Over) -> Measure:
    """Return the mean and deviation over seeds of the mean over configurations, or the other way round.

    >>> measure({(0, 0): 1.0, (1, 0): 3.0, (0, 1): 5.0, (1, 1): 7.0}, "configs")
    Measure(mean=4.0, std=1.4142135623730951, rank=None)
    >>> measure({(0, 0): 1.0, (1, 0): 3.0}, "seeds")
    Measure(mean=2.0, std=None, rank=None)
    """
    groups = group_by(values, lambda key: key[1 if over == "seeds" else 0])
    means = [float(np.mean([values[key] for key in group])) for group in groups.values()]
    if not means:
        return Measure(float("nan"), None)
    return Measure(float(np.mean(means)), float(np.std(means, ddof=1)) if len(means) > 1 else None)
