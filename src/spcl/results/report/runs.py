"""The data of each run in the report: a row of the list, and its curves, thinned and packed."""

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spcl.errors import SpclError
from spcl.results.compare import MEASURES
from spcl.results.names import display_name
from spcl.results.records import RunRecord
from spcl.runs.settings import shown_settings

__all__ = ["pack", "points_per_curve", "run_details", "run_row", "to_columns"]

MOST_POINTS, FEWEST_POINTS, ALL_POINTS = 200, 40, 100_000


def points_per_curve(runs: int) -> int:
    """Return the number of points of a curve that keeps a report of many runs reasonably small.

    >>> points_per_curve(10), points_per_curve(1000), points_per_curve(10_000)
    (200, 100, 40)
    """
    return max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(runs, 1)))


def run_row(run: RunRecord) -> dict[str, Any]:
    """Return the run's row in the list of runs; the results of an unfinished run are None."""
    result = run.result
    return {
        "benchmark": run.benchmark,
        "scenario": run.scenario,
        "label": run.label,
        "method": display_name(run.label),
        "config": run.config,
        "seed": run.seed,
        "accuracy": _rounded(result.accuracy, digits=12) if result else None,  # the page rounds as the tables do
        "measure": result.measure if result else "accuracy",
        "forgetting": _rounded(result.forgetting, digits=12) if result else None,
        "steps": result.steps if result else None,
        "seconds": _rounded(result.seconds.get("training")) if result else None,
    }


def run_details(run: RunRecord, points: int) -> dict[str, Any]:
    """Return everything that the page of a run shows."""
    details: dict[str, Any] = {"path": str(run.path), "settings": shown_settings(run.settings)}
    if run.result is not None:
        details |= run.result.model_dump(include={"tasks", "environment", "left_out"})
        if points == MOST_POINTS and (result := run.full_result()) is not None:  # not in reports of very many runs
            details |= result.model_dump(include={"confusion", "class_names"})
    try:
        entries = run.metrics()
    except SpclError as error:
        return details | {"problem": str(error)}
    start: Mapping[str, Any] = next((entry for entry in entries if entry["kind"] == "start"), {})
    return details | {
        "names": start.get("tasks", []),
        "classes": [len(classes) for classes in start.get("label_set", [])],
        "timeline": start.get("timeline", []),
        "evaluations": _evaluations(entries, start.get("tasks", []), points),
        "stability": _stability([entry for entry in entries if entry["kind"] == "step"], points),
    }


def _evaluations(entries: Sequence[Mapping[str, Any]], tasks: Sequence[str], points: int) -> dict[str, Any]:
    """Return accuracies over time: all evaluations at the end of a task, and as many ``points`` of the others."""
    evaluations = [entry for entry in entries if entry["kind"] == "evaluation"]
    between = [number for number, entry in enumerate(evaluations) if not entry["ended"]]
    kept = {between[index] for index in _spread_indices(len(between), points)}
    shown = [entry for number, entry in enumerate(evaluations) if entry["ended"] or number in kept]
    return {
        "step": [entry["step"] for entry in shown],
        "ended": [entry["ended"] for entry in shown],
        "accuracy": [[_rounded(entry["accuracy"].get(task)) for entry in shown] for task in tasks],
    }


def _stability(steps: Sequence[Mapping[str, Any]], points: int) -> dict[str, Any]:
    """Return the three measures before and after adjustment, at evenly spread steps with two gradients or more."""
    measured = [entry for entry in steps if entry["before"] or entry["after"]]
    chosen = [measured[index] for index in _spread_indices(len(measured), points)]
    curves = {
        when: {measure: [_rounded((entry[when] or {}).get(measure)) for entry in chosen] for measure in MEASURES}
        for when in ("before", "after")
    }
    return {"step": [entry["step"] for entry in chosen], "of": len(measured), **curves}


def _spread_indices(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spread indices below ``count``, with the first and the last.

    >>> _spread_indices(3, 10), _spread_indices(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _rounded(value: float | None, digits: int = 5) -> float | None:
    """Return a number with few digits, None if it is not finite.

    >>> _rounded(91.062499), _rounded(float("inf"))
    (91.062, None)
    """
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def pack(content: Mapping[str, Any]) -> str:
    """Return compressed JSON as text, for a browser's ``atob``, ``DecompressionStream`` and ``JSON.parse``."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def to_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns.

    >>> to_columns([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    {'a': [1, 3], 'b': [2, 4]}
    """
    table: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            table.setdefault(name, []).append(value)
    return table
