"""Stability of training by method: the paper's §5.3 in numbers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from spcl.errors import SpclError
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import display_name, method_order

__all__ = ["stability_text"]

Step = dict[str, Any]

NOTE = (
    "Geometric means of κ and of the ratio of the largest to the smallest gradient norm, means of the others, over the "
    "recorded steps with two gradients or more of all runs; before and after the weighting. Gradients conflict in the "
    "steps where the mean cosine of their pairs is negative. κ is infinite where a gradient has the weight 0, and left "
    "out of its mean; then magnitude similarities with it are 0."
)


def stability_text(records: Iterable[RunRecord]) -> str:
    """Return κ, cosines, magnitude similarities and norms of every method in Markdown, by benchmark and scenario."""
    runs = complete_runs(records)
    if not runs:
        raise SpclError("there are no complete runs; finish some to measure their stability")
    groups = group_by(runs, lambda run: (run.benchmark, run.scenario))
    return "\n".join(_section(*key, groups[key]) for key in sorted(groups))


def _section(benchmark: str, scenario: str, runs: Sequence[CompleteRun]) -> str:
    by_label = group_by(runs, lambda run: run.label)
    labels = sorted(by_label, key=lambda label: method_order(by_label[label][0].method))
    lines = [f"### {benchmark}, {scenario}-incremental", "", f"| method | {' | '.join(COLUMNS)} |"]
    lines.append(f"|:--|{'--:|' * len(COLUMNS)}")
    for label in labels:
        steps = [step for run in by_label[label] for step in run.metrics() if step["kind"] == "step" and step["before"]]
        entries = " | ".join(_format(column(steps)) for column in COLUMNS.values())
        lines.append(f"| {display_name(label)} | {entries} |")
    return "\n".join([*lines, "", NOTE, ""])


def _values(steps: Sequence[Step], when: str, measure: str) -> list[float]:
    return [step[when][measure] for step in steps if step[when] and step[when][measure] is not None]


def _mean(when: str, measure: str) -> Callable[[Sequence[Step]], float | None]:
    def column(steps: Sequence[Step]) -> float | None:
        values = _values(steps, when, measure)
        if not values:
            return None
        return _geometric(values) if measure == "condition_number" else float(np.mean(values))

    return column


def _infinite_share(steps: Sequence[Step]) -> float | None:
    """Return in how many per cent of the steps κ after the weighting is infinite."""
    measured = [step["after"] for step in steps if step["after"]]
    return 100.0 * float(np.mean([after["condition_number"] is None for after in measured])) if measured else None


def _conflict_share(steps: Sequence[Step]) -> float | None:
    """Return in how many per cent of the steps the gradients conflict: the mean cosine of their pairs is negative."""
    cosines = _values(steps, "before", "cosine")
    return 100.0 * float(np.mean(np.array(cosines) < 0.0)) if cosines else None


def _norm_ratio(steps: Sequence[Step]) -> float | None:
    """Return the ratio of the largest to the smallest norm; None for records without norms."""
    norms = [list(step["norms"].values()) for step in steps if step.get("norms")]
    ratios = [max(each) / min(each) for each in norms if None not in each and min(each) > 0.0]
    return _geometric(ratios) if ratios else None


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def _format(value: float | None) -> str:
    """Return a number of three digits.

    >>> _format(None), _format(1.2345), _format(-0.5)
    ('–', '1.23', '-0.5')
    """
    return "–" if value is None else f"{value:.3g}"


COLUMNS: dict[str, Callable[[Sequence[Step]], float | None]] = {
    "κ before": _mean("before", "condition_number"),
    "κ after": _mean("after", "condition_number"),
    "κ = ∞ after, %": _infinite_share,
    "conflicts before, %": _conflict_share,
    "cosine before": _mean("before", "cosine"),
    "cosine after": _mean("after", "cosine"),
    "magnitude similarity before": _mean("before", "magnitude_similarity"),
    "magnitude similarity after": _mean("after", "magnitude_similarity"),
    "largest/smallest norm": _norm_ratio,
}
"""The columns, as functions of the recorded steps."""
