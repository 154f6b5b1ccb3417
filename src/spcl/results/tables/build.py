"""Construction of result tables from runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from spcl.data.catalogue import DATA_SETS
from spcl.errors import SpclError
from spcl.results.duplicates import check_duplicates
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.methods import family_of, method_order
from spcl.results.tables.paper import paper_result
from spcl.results.tables.significance import holm, paired_p_value
from spcl.results.tables.table import Cell, Measure, Over, ResultTable, Row

__all__ = ["make_tables"]

SCENARIOS = ("task", "class")

Values = Mapping[tuple[int, int], float]
"""A number of every complete run, by configuration and seed."""

Column = Mapping[str, Sequence[RunRecord]]
"""The runs on one benchmark, by label."""


def make_tables(
    records: Iterable[RunRecord], over: Over = "seeds", against: str | None = None, paper: bool = False
) -> list[ResultTable]:
    """Return a table for each scenario.

    As in the paper, a cell holds the mean over seeds of the mean over configurations, and the (sample) standard
    deviation over seeds; ``over="configs"`` exchanges the two. ``against`` names a method that the others are
    compared with, see :func:`spcl.results.tables.significance.paired_p_value`. A run that several sweeps of a grid have
    in common counts once, with its mean; other duplicates are an error.
    """
    everything = list(records)
    check_duplicates(everything)
    if against is not None and not any(against in (record.label, record.method) for record in everything):
        found = ", ".join(repr(label) for label in sorted({record.label for record in everything}))
        raise SpclError(f"there are no runs of {against!r} to compare with; there are {found}")
    by_scenario = group_by(everything, lambda record: record.scenario)
    return [_table(name, by_scenario[name], over, against, paper) for name in SCENARIOS if name in by_scenario]


def _table(scenario: str, records: Sequence[RunRecord], over: Over, against: str | None, paper: bool) -> ResultTable:
    methods = {record.label: record.method for record in records}
    rows = tuple(
        Row(label, methods[label], family_of(methods[label]))
        for label in sorted(methods, key=lambda label: method_order(methods[label]))
    )
    by_benchmark = group_by(records, lambda record: record.benchmark)
    benchmarks = tuple(sorted(by_benchmark))
    cells: dict[tuple[str, str], Cell] = {}
    for benchmark in benchmarks:
        column = group_by(by_benchmark[benchmark], lambda record: record.label)
        for label, cell in _cells(column, over, against, paper).items():
            cells[label, benchmark] = cell
    partial_data = {name: text for name in benchmarks if (text := _partial_data(complete_runs(by_benchmark[name])))}
    return ResultTable(scenario, benchmarks, rows, cells, over, against, partial_data)


def _partial_data(runs: Iterable[CompleteRun]) -> str:
    """Return how much of a published data set these runs had; empty if all of it."""
    for run in runs:
        published, data = DATA_SETS.get(run.benchmark), run.result.data
        if published is None or data is None:
            continue
        if run.settings["validation"]:  # then the test samples are held-out training samples
            count = data.train + data.test
            if count != published.train:
                return f"{count:,} training samples, not {published.train:,}"
        elif (data.train, data.test) != (published.train, published.test):
            return (
                f"{data.train:,} training samples, not {published.train:,}, "
                f"and {data.test:,} test samples, not {published.test:,}"
            )
    return ""


# -- cells


def _cells(column: Column, over: Over, against: str | None, paper: bool) -> dict[str, Cell]:
    """Return the cells of one benchmark by label."""
    keys = {(record.config, record.seed) for records in column.values() for record in records}
    expected = len({config for config, _ in keys}) * len({seed for _, seed in keys})
    unranked = {label: _cell(complete_runs(records), expected, over) for label, records in column.items()}
    cells = {label: cell for labels in _comparable(column) for label, cell in _ranked(unranked, labels).items()}
    if against is not None:
        cells = _with_significance(cells, column, against)
    if paper:
        cells = {label: _with_paper(cell, column[label][0]) for label, cell in cells.items()}
    return cells


def _cell(runs: Sequence[CompleteRun], expected: int, over: Over) -> Cell:
    accuracy, forgetting = _mean_values(runs, "accuracy"), _mean_values(runs, "forgetting")
    with_skips = {(run.config, run.seed) for run in runs if run.has_skipped_steps}
    return Cell(
        _measure(accuracy, over),
        _measure(forgetting, over),
        runs=len(accuracy),
        missing=expected - len(accuracy),
        runs_with_skips=len(with_skips),
    )


def _comparable(column: Column) -> Iterable[list[str]]:
    """Return the labels in groups of comparable ones: accuracies on held-out training data are not test accuracies."""
    return group_by(column, lambda label: column[label][0].settings["validation"]).values()


def _mean_values(runs: Iterable[CompleteRun], name: str) -> Values:
    groups = group_by(runs, lambda run: (run.config, run.seed))
    return {key: float(np.mean([getattr(run.result, name) for run in group])) for key, group in groups.items()}


def _measure(values: Values, over: Over) -> Measure:
    """Return the mean and deviation over seeds of the mean over configurations, or the other way round.

    >>> _measure({(0, 0): 1.0, (1, 0): 3.0, (0, 1): 5.0, (1, 1): 7.0}, "configs")
    Measure(mean=4.0, std=1.4142135623730951, rank=None)
    """
    groups = group_by(values, lambda key: key[1 if over == "seeds" else 0])
    means = [float(np.mean([values[key] for key in group])) for group in groups.values()]
    if not means:
        return Measure(float("nan"), None)
    return Measure(float(np.mean(means)), float(np.std(means, ddof=1)) if len(means) > 1 else None)


def _ranked(cells: Mapping[str, Cell], labels: Sequence[str]) -> dict[str, Cell]:
    """Return these cells with the best and second best marked; cells with missing runs are not ranked."""
    complete = {label: cells[label] for label in labels if not cells[label].missing}
    accuracy = _ranks({label: cell.accuracy.mean for label, cell in complete.items()})
    forgetting = _ranks({label: cell.forgetting.mean for label, cell in complete.items()})
    return {
        label: replace(
            cells[label],
            accuracy=replace(cells[label].accuracy, rank=accuracy.get(label)),
            forgetting=replace(cells[label].forgetting, rank=forgetting.get(label)),
        )
        for label in labels
    }


def _ranks(means: Mapping[str, float]) -> dict[str, int]:
    """Return ranks 1 and 2 by label; none where there is only one label.

    >>> _ranks({"a": 1.0, "b": 3.0, "c": 2.0})
    {'b': 1, 'c': 2}
    """
    order = sorted(set(means.values()), reverse=True)[:2] if len(means) > 1 else []
    return {label: rank for rank, best in enumerate(order, 1) for label, mean in means.items() if mean == best}


def _with_paper(cell: Cell, record: RunRecord) -> Cell:
    """Return the cell with the paper's value, which is about parallel training and test data."""
    if record.paradigm != "parallel" or record.settings["validation"]:
        return cell
    return replace(cell, paper=paper_result(record.scenario, record.benchmark, record.method))


def _with_significance(cells: Mapping[str, Cell], column: Column, against: str) -> dict[str, Cell]:
    """Return the cells with their difference from the reference, all p-values of the column corrected together."""
    chosen = _reference(column, against)
    comparable = next((labels for labels in _comparable(column) if chosen in labels), [])
    accuracies = {label: _mean_values(complete_runs(column[label]), "accuracy") for label in comparable}
    reference = accuracies.get(chosen, {})
    p_values = {
        label: p_value
        for label, values in accuracies.items()
        if values is not reference and (p_value := paired_p_value(values, reference)) is not None
    }
    result = dict(cells)
    for label, p_value in zip(p_values, holm(list(p_values.values())), strict=True):
        values = accuracies[label]
        gain = float(np.mean([values[key] - reference[key] for key in values.keys() & reference.keys()]))
        result[label] = replace(cells[label], p_value=p_value, gain=gain)
    return result


def _reference(column: Column, against: str) -> str:
    """Return the label that ``against`` names: itself, or the only variant of a method."""
    if against in column:
        return against
    variants = [label for label, records in column.items() if records[0].method == against]
    if len(variants) > 1:
        raise SpclError(f"{against!r} has variants; compare with one of {', '.join(map(repr, variants))}")
    return variants[0] if variants else against
