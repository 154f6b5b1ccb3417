"""What figures draw, taken out of the records of runs."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from spcl.results.records import RunRecord

__all__ = [
    "MEASURES",
    "Array",
    "Curve",
    "Curves",
    "Measure",
    "blocks",
    "counted",
    "grouped",
    "mean_curve",
    "ranges",
]

Array = NDArray[np.float64]
Curve = tuple[Array, Array]
"""Steps, and a value at each."""

Measure = Literal["condition_number", "cosine", "magnitude_similarity"]
MEASURES: dict[Measure, str] = {
    "condition_number": "condition number κ",
    "cosine": "conflicts (cosine)",
    "magnitude_similarity": "magnitude similarity",
}
"""The paper's three measures of stability, and what their axes are called."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Curves:
    """The record of one run over time; its metrics are read when first asked for."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run

    @cached_property
    def _entries(self) -> dict[str, list[dict[str, Any]]]:
        return grouped(self.run.metrics(), lambda entry: str(entry["kind"]))

    @property
    def tasks(self) -> list[str]:
        """Their names, in the order in which they start."""
        return list(self._entries["start"][0]["tasks"])

    @property
    def timeline(self) -> list[tuple[int, int]]:
        """The first and last step of each task."""
        return [(first, last) for first, last in self._entries["start"][0]["timeline"]]

    def stability(self, measure: Measure, when: Literal["before", "after"]) -> Curve:
        """A measure of the gradients, before or after adjustment, at the steps that have two columns or more.

        NaN where the measure is infinite or not known.
        """
        entries = [entry for entry in self._entries.get("step", []) if entry[when] is not None]
        values = [entry[when][measure] for entry in entries]
        return _steps(entries), np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def accuracy(self, task: str) -> Curve:
        """A task's accuracy, in per cent, wherever it was evaluated."""
        entries = [entry for entry in self._entries.get("evaluation", []) if task in entry["accuracy"]]
        return _steps(entries), np.array([entry["accuracy"][task] for entry in entries], dtype=np.float64)

    def at_ends(self) -> Array:
        """The average accuracy of the tasks seen whenever a task ended; two that end together count twice."""
        return np.array(
            [
                float(np.mean(list(entry["accuracy"].values())))
                for entry in self._entries.get("evaluation", [])
                for _ in entry["ended"]
            ]
        )


def _steps(entries: Sequence[dict[str, Any]]) -> Array:
    return np.array([entry["step"] for entry in entries], dtype=np.float64)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, keys and items in the order of their appearance.

    >>> grouped([1, 2, 3], lambda number: number % 2)
    {1: [1, 3], 0: [2]}
    """
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def counted(numbers: Iterable[int], noun: str) -> str:
    """How many there are, in words.

    >>> counted([1], "run"), counted([3, 2, 2], "run")
    ('1 run', '2 to 3 runs')
    """
    counts = sorted(numbers)
    low, high = counts[0], counts[-1]
    return f"{low if low == high else f'{low} to {high}'} {noun}{'' if high == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, briefly.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean, at every step where one of the curves has a value, of those that have.

    >>> a, b = (np.array([0.0, 1.0]), np.array([2.0, 4.0])), (np.array([1.0]), np.array([6.0]))
    >>> mean_curve([a, b])
    (array([0., 1.]), array([2., 5.]))
    """
    points = [(steps[np.isfinite(values)], values[np.isfinite(values)]) for steps, values in curves]
    steps = np.concatenate([steps for steps, _ in points])
    values = np.concatenate([values for _, values in points])
    unique, place = np.unique(steps, return_inverse=True)
    return unique, np.bincount(place, values) / np.bincount(place)


def blocks(curve: Curve, count: int) -> Curve:
    """At most `count` points: the mean step and the median value of as many stretches of the curve.

    >>> blocks((np.arange(6.0), np.array([1.0, 9.0, 2.0, 5.0, 5.0, 8.0])), 2)
    (array([1., 4.]), array([2., 5.]))
    """
    steps, values = (part[np.isfinite(curve[1])] for part in curve)
    if len(steps) <= count:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), count)
    return np.array([steps[part].mean() for part in parts]), np.array([np.median(values[part]) for part in parts])
