"""Curves over training steps, taken from the metrics of runs."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spcl.results.grouping import group_by
from spcl.results.measures import Measure
from spcl.results.records import RunRecord

__all__ = ["Array", "Curve", "RunCurves", "block_medians", "mean_curve"]

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

    def stability(self, measure: Measure, when: Literal["before", "after"]) -> Curve:
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
