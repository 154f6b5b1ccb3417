"""Construction of result tables from runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from spcl.errors import SpclError
from spcl.results.duplicates import check_duplicates
from spcl.results.grouping import group_by
from spcl.results.records import CompleteRun, RunRecord, complete_runs
from spcl.results.tables.averages import expected_runs, mean_values, measure, median_step_time
from spcl.results.tables.methods import family_of, method_order
from spcl.results.tables.paper_problem import comparable_paper_result, paper_note
from spcl.results.tables.partial_data import partial_data
from spcl.results.tables.significance import configuration_p_value, holm, paired_p_value
from spcl.results.tables.table import Cell, Over, ResultTable, Row
from spcl.results.tables.usual_settings import usual_settings_note
from spcl.runs.result import common_measure

__all__ = ["make_tables"]

SCENARIOS = ("task", "class")

Column = Mapping[str, Sequence[RunRecord]]
"""The runs on one benchmark, by label."""


def make_tables(
    records: Iterable[RunRecord],
    over: Over = "seeds",
    against: str | None = None,
    paper: bool = False,
    time: bool = False,
) -> list[ResultTable]:
    """Return a table for each scenario.

    As in the paper, a cell holds the mean over seeds of the mean over configurations, and the (sample) standard
    deviation over seeds; ``over="configs"`` exchanges the two. ``against`` names a method that the others are
    compared with, see :func:`spcl.results.tables.significance.paired_p_value`. ``paper`` adds the paper's values,
    ``time`` the time of a step. A run that several sweeps of a grid have
    in common counts once, with its mean; other duplicates are an error.
    """
    everything = list(records)
    check_duplicates(everything)
    reference = None if against is None else _known_name(against, everything)
    by_scenario = group_by(everything, lambda record: record.scenario)
    tables = [_table(name, by_scenario[name], over, reference, paper) for name in SCENARIOS if name in by_scenario]
    return [replace(table, time=time) for table in tables]


def _known_name(against: str, records: Sequence[RunRecord]) -> str:
    """Return the label or method that ``against`` names in any case, since tables show display names."""
    known = {name.lower(): name for record in records for name in (record.label, record.recipe)}
    if against.lower() not in known:
        found = ", ".join(repr(label) for label in sorted({record.label for record in records}))
        raise SpclError(f"there are no runs of {against!r} to compare with; there are {found}")
    return known[against.lower()]


def _table(scenario: str, records: Sequence[RunRecord], over: Over, against: str | None, paper: bool) -> ResultTable:
    methods = {record.label: record.recipe for record in records}
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
    partial = {name: text for name in benchmarks if (text := partial_data(complete_runs(by_benchmark[name])))}
    usual_settings = {name: text for name in benchmarks if (text := usual_settings_note(by_benchmark[name]))}
    paper_notes = {name: text for name in benchmarks if paper and (text := paper_note(by_benchmark[name]))}
    measure_name = common_measure(record.result for record in records)
    notes = (partial, usual_settings, paper_notes)
    return ResultTable(scenario, benchmarks, rows, cells, over, against, *notes, measure_name)


# -- cells


def _cells(column: Column, over: Over, against: str | None, paper: bool) -> dict[str, Cell]:
    """Return the cells of one benchmark by label."""
    expected = expected_runs(record for records in column.values() for record in records)
    unranked = {label: _cell(complete_runs(records), expected, over) for label, records in column.items()}
    cells = {label: cell for labels in _comparable(column) for label, cell in _ranked(unranked, labels).items()}
    if against is not None:
        cells = _with_significance(cells, column, against)
    if paper:
        cells = {label: replace(cell, paper=comparable_paper_result(column[label][0])) for label, cell in cells.items()}
    return cells


def _cell(runs: Sequence[CompleteRun], expected: int, over: Over) -> Cell:
    accuracy, forgetting = mean_values(runs, "accuracy"), mean_values(runs, "forgetting")
    with_skips = {(run.config, run.seed) for run in runs if run.has_skipped_steps}
    return Cell(
        measure(accuracy, over),
        measure(forgetting, over),
        runs=len(accuracy),
        missing=expected - len(accuracy),
        runs_with_skips=len(with_skips),
        step_time=median_step_time(runs),
    )


def _comparable(column: Column) -> Iterable[list[str]]:
    """Return the labels in groups of comparable ones: accuracies on held-out training data are not test accuracies."""
    return group_by(column, lambda label: column[label][0].settings.get("validation")).values()


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


def _with_significance(cells: Mapping[str, Cell], column: Column, against: str) -> dict[str, Cell]:
    """Return the cells with their difference from the reference, all p-values of the column corrected together."""
    chosen = _reference(column, against)
    comparable = next((labels for labels in _comparable(column) if chosen in labels), [])
    accuracies = {label: mean_values(complete_runs(column[label]), "accuracy") for label in comparable}
    reference = accuracies.pop(chosen, {})
    pairs = {label: values.keys() & reference.keys() for label, values in accuracies.items()}
    p_values = {
        label: p_value
        for label, values in accuracies.items()
        if (p_value := paired_p_value(values, reference)) is not None
    }
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    result = dict(cells)
    for label, values in accuracies.items():
        differences = [values[key] - reference[key] for key in pairs[label]]
        gain = float(np.mean(differences)) if differences else None
        result[label] = replace(
            cells[label],
            p_value=corrected.get(label),
            config_p_value=configuration_p_value(values, reference),
            gain=gain,
            pairs=len(differences),
        )
    return result


def _reference(column: Column, against: str) -> str:
    """Return the label that ``against`` names: itself, or the only variant of a method."""
    if against in column:
        return against
    variants = [label for label, records in column.items() if records[0].recipe == against]
    if len(variants) > 1:
        raise SpclError(f"{against!r} has variants; compare with one of {', '.join(map(repr, variants))}")
    return variants[0] if variants else against
