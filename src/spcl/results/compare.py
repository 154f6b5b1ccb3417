"""Runs side by side: where their settings differ, what they reached, how stable their training was."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from spcl.errors import SpclError
from spcl.results.records import RunRecord
from spcl.runs.identity import flat_settings

__all__ = ["Comparison", "compare", "comparison_path", "comparison_table", "stability_summary"]

MEASURES = {"condition_number": "κ", "cosine": "cosine", "magnitude_similarity": "magnitude similarity"}
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found; every list has a value for each run, in their order, None where it has none.

    Attributes:
        runs: the runs.
        settings: the settings in which they differ, by dotted name.
        results: accuracy and forgetting, in per cent.
        tasks: each task's accuracy at the end, in per cent.
        stability: means over training of the measures of the gradients, before and after their adjustment.
    """

    runs: tuple[RunRecord, ...]
    settings: Mapping[str, list[Any]]
    results: Mapping[str, list[float | None]]
    tasks: Mapping[str, list[float | None]]
    stability: Mapping[str, list[float | None]]


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Put runs side by side; unfinished ones may be among them."""
    if not runs:
        raise SpclError("there is nothing to compare; name the folders of some runs")
    settings = _aligned([flat_settings(run.settings) for run in runs])
    results = [run.result or {} for run in runs]
    return Comparison(
        runs=tuple(runs),
        settings={name: values for name, values in settings.items() if any(value != values[0] for value in values)},
        results={name: [result.get(name) for result in results] for name in ("accuracy", "forgetting")},
        tasks=_aligned([{name: task["final"] for name, task in result.get("tasks", {}).items()} for result in results]),
        stability=_aligned([stability_summary(run) for run in runs]),
    )


def _aligned(sources: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """For every name the values that the sources have.

    >>> _aligned([{"a": 1}, {"a": 2, "b": 3}])
    {'a': [1, 2], 'b': [None, 3]}
    """
    names = dict.fromkeys(name for source in sources for name in source)
    return {name: [source.get(name) for source in sources] for name in names}


def stability_summary(run: RunRecord) -> dict[str, float | None]:
    """Means over the recorded steps; of the condition number, which spans orders of magnitude, the geometric mean."""
    steps = [entry for entry in run.metrics() if entry["kind"] == "step"]
    summary = {}
    for measure, title in MEASURES.items():
        for when in ("before", "after"):
            values = [step[when][measure] for step in steps if step[when] and step[when][measure] is not None]
            mean = _geometric_mean if measure == "condition_number" else np.mean
            summary[f"{title} {when}"] = float(mean(values)) if values else None
    return summary


def _geometric_mean(values: Sequence[float]) -> float:
    """
    >>> round(_geometric_mean([1.0, 100.0]), 6)
    10.0
    """
    return float(np.exp(np.mean(np.log(values))))


def comparison_table(comparison: Comparison) -> Table:
    """The comparison for the terminal, a column for each run."""
    scenarios = dict.fromkeys(f"{run.scenario}-incremental" for run in comparison.runs)
    drawn = Table(title=" and ".join(scenarios), title_justify="left", box=box.SIMPLE_HEAD)
    drawn.add_column("")
    for run in comparison.runs:
        drawn.add_column(Text(str(run.path)), justify="right", overflow="fold")
    _add(drawn, "{}", comparison.settings.items())
    _add(drawn, "{}, %", comparison.results.items())
    _add(drawn, "{}, final accuracy, %", comparison.tasks.items())
    _add(drawn, "{}, mean", comparison.stability.items())
    return drawn


def _add(drawn: Table, title: str, rows: Iterable[tuple[str, list[Any]]]) -> None:
    for name, values in rows:
        drawn.add_row(title.format(name), *(Text(_said(value)) for value in values))
    drawn.add_section()


def _said(value: Any) -> str:
    """A value for people.

    >>> _said(None), _said(91.0625), _said("er")
    ('–', '91.06', 'er')
    """
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def comparison_path(out: Path) -> Path:
    """The file that is meant: in a folder ``compare.png``, and a PNG where no ending says otherwise.

    >>> print(comparison_path(Path("runs")), comparison_path(Path("runs.svg")))
    runs.png runs.svg
    """
    if out.is_dir():
        return out / "compare.png"
    if not out.suffix:
        return out.with_name(f"{out.name}.png")
    if out.suffix.lower() not in FORMATS:
        raise SpclError(f"comparisons are drawn as {', '.join(FORMATS)}, not as {out.name!r}; give it such an ending")
    return out
