"""Buckets of a time series: what happened in an interval, as sums and means that can be merged."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spcl.serve.events import StepEvent

__all__ = ["Bucket", "Mean"]


@dataclass
class Mean:
    """Sum and number of finite values.

    >>> mean = Mean()
    >>> for value in (1.0, 3.0, float("nan")):
    ...     mean.add(value)
    >>> mean.value
    2.0
    """

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        """Include a value; None and what is not finite are left out."""
        if value is not None and math.isfinite(value):
            self.total += value
            self.count += 1

    def merge(self, other: "Mean") -> None:
        """Include the values of another."""
        self.total += other.total
        self.count += other.count

    @property
    def value(self) -> float | None:
        """The mean; None without values."""
        return self.total / self.count if self.count else None


Means = dict[str, Mean]


@dataclass
class Bucket:
    """What happened in an interval of time: sums, and means by task; of κ the mean of its logarithm.

    Attributes:
        start: the beginning of the interval, in seconds since the epoch.
        steps: the number of steps.
        skipped: the number of batches that were skipped because they were not finite.
        seconds: the time spent in steps.
        samples: by task, the number of samples.
        losses, accuracies: by task, means.
        lags: by task, the largest lag in seconds.
        kappas: ``before`` and ``after``: means of log κ.
    """

    start: float
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    losses: Means = field(default_factory=dict)
    accuracies: Means = field(default_factory=dict)
    lags: dict[str, float] = field(default_factory=dict)
    kappas: Means = field(default_factory=dict)

    def add(self, event: StepEvent) -> None:
        """Include a step."""
        self.steps += 1
        self.skipped += len(event.skipped)
        self.seconds += event.seconds
        for task, count in event.samples.items():
            self.samples[task] = self.samples.get(task, 0) + count
        for means, values in ((self.losses, event.losses), (self.accuracies, event.accuracies)):
            for task, value in values.items():
                means.setdefault(task, Mean()).add(value)
        for name, kappa in (("before", event.kappa_before), ("after", event.kappa_after)):
            if kappa is not None and kappa > 0.0:
                self.kappas.setdefault(name, Mean()).add(math.log(kappa))

    def add_lags(self, lags: Mapping[str, float]) -> None:
        """Include lags, of which the largest of a task stays."""
        for task, lag in lags.items():
            self.lags[task] = max(lag, self.lags.get(task, 0.0))

    def merge(self, other: "Bucket") -> None:
        """Include the interval that follows."""
        self.steps += other.steps
        self.skipped += other.skipped
        self.seconds += other.seconds
        for task, count in other.samples.items():
            self.samples[task] = self.samples.get(task, 0) + count
        self.add_lags(other.lags)
        for mine, theirs in (
            (self.losses, other.losses),
            (self.accuracies, other.accuracies),
            (self.kappas, other.kappas),
        ):
            for name, mean in theirs.items():
                mine.setdefault(name, Mean()).merge(mean)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: means as numbers, κ itself."""
        kappas = {name: math.exp(value) for name, value in _values(self.kappas).items()}
        return {
            "start": self.start,
            "steps": self.steps,
            "skipped": self.skipped,
            "samples": dict(self.samples),
            "losses": _rounded(_values(self.losses)),
            "accuracies": _rounded(_values(self.accuracies)),
            "lags": _rounded(self.lags),
            "kappas": _rounded(kappas),
        }


def _values(means: Means) -> dict[str, float]:
    return {name: value for name, mean in means.items() if (value := mean.value) is not None}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Return values with five digits, which are enough to draw and a third of the bytes."""
    return {name: float(f"{value:.5g}") for name, value in values.items()}
