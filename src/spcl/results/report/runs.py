"""What the report holds of each run: a row for the list, and its curves, thinned and packed."""

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spcl.errors import SpclError
from spcl.results.figures.style import display
from spcl.results.records import RunRecord
from spcl.runs.identity import flat_settings

__all__ = ["pack", "points_per_curve", "run_details", "run_row"]

MEASURES = ("condition_number", "cosine", "magnitude_similarity")
MOST_POINTS, FEWEST_POINTS, ALL_POINTS = 200, 40, 100_000


def points_per_curve(runs: int) -> int:
    """How many points a curve may have, so that thousands of runs still make a report of reasonable size.

    >>> points_per_curve(10), points_per_curve(1000), points_per_curve(10_000)
    (200, 100, 40)
    """
    return max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(runs, 1)))


def run_row(run: RunRecord) -> dict[str, Any]:
    """The run in the list of runs; what is not known of an unfinished one is None."""
    result = run.result or {}
    return {
        "benchmark": run.benchmark,
        "scenario": run.scenario,
        "label": run.label,
        "method": display(run.label),
        "config": run.config,
        "seed": run.seed,
        "accuracy": _rounded(result.get("accuracy"), digits=12),  # rounded twice it would differ from the tables
        "forgetting": _rounded(result.get("forgetting"), digits=12),
        "steps": result.get("steps"),
        "seconds": _rounded(result.get("seconds", {}).get("training")),
    }


def run_details(run: RunRecord, points: int) -> dict[str, Any]:
    """Everything that the page of a run shows."""
    details: dict[str, Any] = {"path": str(run.path), "settings": flat_settings(run.settings)}
    if run.result is not None:
        details |= {name: run.result.get(name) for name in ("tasks", "environment", "left_out", "data")}
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
    """Accuracies over time; every evaluation at the end of a task, and of the others as many as there is room for."""
    evaluations = [entry for entry in entries if entry["kind"] == "evaluation"]
    between = [number for number, entry in enumerate(evaluations) if not entry["ended"]]
    kept = {between[place] for place in _places(len(between), points)}
    shown = [entry for number, entry in enumerate(evaluations) if entry["ended"] or number in kept]
    return {
        "step": [entry["step"] for entry in shown],
        "ended": [entry["ended"] for entry in shown],
        "accuracy": [[_rounded(entry["accuracy"].get(task)) for entry in shown] for task in tasks],
    }


def _stability(steps: Sequence[Mapping[str, Any]], points: int) -> dict[str, Any]:
    """The three measures before and after adjustment, at evenly chosen steps of those that have two columns or more."""
    measured = [entry for entry in steps if entry["before"] or entry["after"]]
    chosen = [measured[place] for place in _places(len(measured), points)]
    curves = {
        when: {measure: [_rounded((entry[when] or {}).get(measure)) for entry in chosen] for measure in MEASURES}
        for when in ("before", "after")
    }
    return {"step": [entry["step"] for entry in chosen], "of": len(measured), **curves}


def _places(count: int, most: int) -> list[int]:
    """At most so many numbers below `count`, the first and the last among them.

    >>> _places(3, 10), _places(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _rounded(value: float | None, digits: int = 5) -> float | None:
    """Five digits suffice to look at.

    >>> _rounded(91.062499), _rounded(float("inf"))
    (91.062, None)
    """
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def pack(content: Mapping[str, Any]) -> str:
    """Plain data as text of little size, for a browser's ``atob``, ``DecompressionStream`` and ``JSON.parse``."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns, which name every column once.

    >>> columns([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    {'a': [1, 3], 'b': [2, 4]}
    """
    table: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            table.setdefault(name, []).append(value)
    return table
