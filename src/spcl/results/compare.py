"""Stability of training, and comparison of single runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from spcl.errors import SpclError
from spcl.results.names import display_name, method_order
from spcl.results.records import CompleteRun, RunRecord, complete_runs, group_by
from spcl.runs.records import SOURCE_MEASURES, RunResult, common_measure
from spcl.runs.settings import flat_settings

Measure = Literal["condition_number", "cosine", "magnitude_similarity"]

MEASURES: dict[Measure, str] = {
    "condition_number": "condition number κ",
    "cosine": "conflicts (cosine)",
    "magnitude_similarity": "magnitude similarity",
}
"""The titles of the measures."""


# -- stability, by method: the paper's §5.3 in numbers

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
        entries = " | ".join(_three_digits(column(steps)) for column in COLUMNS.values())
        lines.append(f"| {display_name(label)} | {entries} |")
    return "\n".join([*lines, "", NOTE, ""])


def _values(steps: Sequence[Step], when: str, measure: str) -> list[float]:
    return [step[when][measure] for step in steps if step[when] and step[when][measure] is not None]


def _mean(when: str, measure: str) -> Callable[[Sequence[Step]], float | None]:
    def column(steps: Sequence[Step]) -> float | None:
        values = _values(steps, when, measure)
        if not values:
            return None
        return _geometric_mean(values) if measure == "condition_number" else float(np.mean(values))

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
    return _geometric_mean(ratios) if ratios else None


def _three_digits(value: float | None) -> str:
    """Return a number of three digits.

    >>> _three_digits(None), _three_digits(1.2345), _three_digits(-0.5)
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


# -- comparison of single runs

TITLES: dict[Measure, str] = {
    "condition_number": "κ",
    "cosine": "cosine",
    "magnitude_similarity": "magnitude similarity",
}

WIDEST_VALUE = 24
"""The most characters of a value on one line, such as a path."""

MOST_COLUMNS = 10_000
"""A width of lines that every table fits into."""


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
    anytime = [result.anytime if result else None for result in results]
    return Comparison(
        runs=tuple(runs),
        settings={name: values for name, values in settings.items() if any(value != values[0] for value in values)},
        results={
            common_measure(results): [result.accuracy if result else None for result in results],
            "forgetting": [result.forgetting if result else None for result in results],
            **({"accuracy at any time": anytime} if any(value is not None for value in anytime) else {}),
            **_of_sources(results),
        },
        tasks=_align(
            [{name: task.final for name, task in result.tasks.items()} if result else {} for result in results]
        ),
        stability=_align([stability_summary(run) for run in runs]),
    )


def _of_sources(results: Sequence[RunResult | None]) -> dict[str, list[float | None]]:
    """Return the measures of sources that some of the results have, by their titles."""
    found = _align([result.of_sources if result else {} for result in results])
    noun = common_measure(results)
    return {each.title.format(noun): found[name] for name, each in SOURCE_MEASURES.items() if name in found}


def stability_summary(run: RunRecord) -> dict[str, float | None]:
    """Return the mean of each measure over the recorded steps; of κ, which spans orders of magnitude, the geometric."""
    steps = [entry for entry in run.metrics() if entry["kind"] == "step"]
    return {
        f"{title} {when}": _mean(when, measure)(steps)
        for measure, title in TITLES.items()
        for when in ("before", "after")
    }


def comparison_table(comparison: Comparison, shown: Sequence[int] | None = None) -> Table:
    """Return the comparison for the terminal, with a column for each run, or for those at the indices ``shown``.

    A column is headed by the number of its run, counted from 1.
    """
    scenarios = dict.fromkeys(f"{run.scenario}-incremental" for run in comparison.runs)
    table = Table(title=" and ".join(scenarios), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True, overflow="fold")
    chosen = range(len(comparison.runs)) if shown is None else shown
    for index in chosen:
        table.add_column(str(index + 1), justify="right", overflow="fold", max_width=WIDEST_VALUE)
    measure = common_measure(run.result for run in comparison.runs)
    for title, rows in (
        ("{}", comparison.settings),
        ("{}, %", comparison.results),
        (f"{{}}, final {measure}, %", comparison.tasks),
        ("{}, mean", comparison.stability),
    ):
        for name, values in rows.items():
            table.add_row(Text(title.format(name)), *(Text(_format(values[index])) for index in chosen))
        table.add_section()
    return table


def fitting_tables(comparison: Comparison, console: Console) -> list[Table]:
    """Return the comparison as one table, or as several with a part of the runs each where one would be too wide."""
    count = len(comparison.runs)
    for size in range(count, 0, -1):
        parts = [range(first, min(first + size, count)) for first in range(0, count, size)]
        tables = [comparison_table(comparison, part) for part in parts]
        unlimited = console.options.update(max_width=MOST_COLUMNS)
        if all(Measurement.get(console, unlimited, table).maximum <= console.width for table in tables):
            break
    return tables


def _align(sources: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return for every name the values in all sources.

    >>> _align([{"a": 1}, {"a": 2, "b": 3}])
    {'a': [1, 2], 'b': [None, 3]}
    """
    names = dict.fromkeys(name for source in sources for name in source)
    return {name: [source.get(name) for source in sources] for name in names}


def _geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean.

    >>> round(_geometric_mean([1.0, 100.0]), 6)
    10.0
    """
    return float(np.exp(np.mean(np.log(values))))


def _format(value: Any) -> str:
    """Return a value as text of four digits.

    >>> _format(None), _format(91.0625), _format("er")
    ('–', '91.06', 'er')
    """
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
