"""Comparison of single runs: differing settings, accuracies and stability of training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from spcl.errors import SpclError
from spcl.results.measures import Measure
from spcl.results.records import RunRecord
from spcl.runs.identity import flat_settings
from spcl.runs.result import common_measure

__all__ = ["Comparison", "compare", "comparison_table", "stability_summary"]

TITLES: dict[Measure, str] = {
    "condition_number": "κ",
    "cosine": "cosine",
    "magnitude_similarity": "magnitude similarity",
}


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`; every list has a value for each run, in their order, None where it has none.

    Attributes:
        runs: the runs.
        settings: the settings in which they differ, by dotted name.
        results: accuracy (or score) and forgetting, in per cent.
        tasks: the final accuracy (or score) of each task, in per cent.
        stability: means over training of the measures of the gradients, before and after their adjustment.
    """

    runs: tuple[RunRecord, ...]
    settings: Mapping[str, list[Any]]
    results: Mapping[str, list[float | None]]
    tasks: Mapping[str, list[float | None]]
    stability: Mapping[str, list[float | None]]


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Compare runs, which need not be complete."""
    if not runs:
        raise SpclError("there are no runs to compare; name the folders of some")
    settings = _align([flat_settings(run.settings) for run in runs])
    results = [run.result for run in runs]
    return Comparison(
        runs=tuple(runs),
        settings={name: values for name, values in settings.items() if any(value != values[0] for value in values)},
        results={
            common_measure(results): [result.accuracy if result else None for result in results],
            "forgetting": [result.forgetting if result else None for result in results],
        },
        tasks=_align([_final_accuracies(run) for run in runs]),
        stability=_align([stability_summary(run) for run in runs]),
    )


def stability_summary(run: RunRecord) -> dict[str, float | None]:
    """Return the mean of each measure over the recorded steps; of κ, which spans orders of magnitude, the geometric."""
    steps = [entry for entry in run.metrics() if entry["kind"] == "step"]
    summary = {}
    for measure, title in TITLES.items():
        for when in ("before", "after"):
            values = [step[when][measure] for step in steps if step[when] and step[when][measure] is not None]
            mean = _geometric_mean if measure == "condition_number" else np.mean
            summary[f"{title} {when}"] = float(mean(values)) if values else None
    return summary


def comparison_table(comparison: Comparison) -> Table:
    """Return the comparison for the terminal, with a column for each run."""
    scenarios = dict.fromkeys(f"{run.scenario}-incremental" for run in comparison.runs)
    table = Table(title=" and ".join(scenarios), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for run in comparison.runs:
        table.add_column(Text(str(run.path)), justify="right", overflow="fold")
    _add_rows(table, "{}", comparison.settings.items())
    _add_rows(table, "{}, %", comparison.results.items())
    measure = common_measure(run.result for run in comparison.runs)
    _add_rows(table, f"{{}}, final {measure}, %", comparison.tasks.items())
    _add_rows(table, "{}, mean", comparison.stability.items())
    return table


def _align(sources: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return for every name the values in all sources.

    >>> _align([{"a": 1}, {"a": 2, "b": 3}])
    {'a': [1, 2], 'b': [None, 3]}
    """
    names = dict.fromkeys(name for source in sources for name in source)
    return {name: [source.get(name) for source in sources] for name in names}


def _final_accuracies(run: RunRecord) -> dict[str, float]:
    return {name: task.final for name, task in run.result.tasks.items()} if run.result else {}


def _geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean.

    >>> round(_geometric_mean([1.0, 100.0]), 6)
    10.0
    """
    return float(np.exp(np.mean(np.log(values))))


def _add_rows(table: Table, title: str, rows: Iterable[tuple[str, list[Any]]]) -> None:
    for name, values in rows:
        table.add_row(title.format(name), *(Text(_format(value)) for value in values))
    table.add_section()


def _format(value: Any) -> str:
    """Return a value as text of four digits.

    >>> _format(None), _format(91.0625), _format("er")
    ('–', '91.06', 'er')
    """
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
