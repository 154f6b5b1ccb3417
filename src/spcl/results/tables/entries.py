"""Headings, entries and notes of result tables, whatever their format."""

import math
from collections.abc import Callable, Iterator
from itertools import groupby

from spcl.results.tables.methods import display_name
from spcl.results.tables.significance import SIGNIFICANT
from spcl.results.tables.table import Cell, Measure, ResultTable, Row

__all__ = ["Style", "headings", "notes", "row_entries", "rows_by_family"]

Style = Callable[[str, int | None], str]
"""A function that marks a number by its rank: best, second best or neither."""


def headings(table: ResultTable, benchmark: str) -> list[str]:
    """Return the headings of the columns of a benchmark."""
    cells = [cell for (_, name), cell in table.cells.items() if name == benchmark]
    paper, by_config = any(cell.paper for cell in cells), any(cell.config_p_value is not None for cell in cells)
    return [
        "A %",
        "F %",
        *(["paper A %", "paper F %"] if paper else []),
        *([f"p vs {display_name(table.against)}"] if table.against else []),
        *(["p over configs"] if by_config else []),
        *(["ms/step"] if table.time else []),
    ]


def notes(table: ResultTable, best: str, second: str, escape: Callable[[str], str]) -> str:
    """Return the sentences below a table: its marks, its remarks and its significance test."""
    measure = table.measure if table.measure == "accuracy" else f"{table.measure} (accuracy, R² or F1)"
    sentences = [f"A is the final {measure}, F the forgetting (higher is better). Best {best}, second best {second}."]
    if any(cell.paper and cell.accuracy.std is not None for cell in table.cells.values()):
        sentences.append("Deviations divide by n - 1; those of the paper by n, which makes them smaller.")
    sentences += map(escape, table.remarks)
    if table.against:
        sentences += _significance_notes(table, escape(display_name(table.against)))
    if table.time:
        sentences.append(
            "ms/step: milliseconds of a training step without evaluation, median over the runs, which may have shared "
            "a machine."
        )
    return " ".join(sentences)


def _significance_notes(table: ResultTable, reference: str) -> list[str]:
    """Return what the p-values and their marks mean."""
    test = f"p: Wilcoxon signed-rank test of A against {reference}, paired by configuration and seed, Holm-corrected"
    if all(cell.config_p_value is None for cell in table.cells.values()):
        return [f"{test}; ▲ better, ▼ worse at p < {SIGNIFICANT}."]
    return [
        f"{test}.",
        "Runs of one configuration are not independent; p over configs is that of the same test on the means of the "
        "configurations, not corrected, and at least 0.004 for nine configurations, 0.06 for five.",
        f"▲ better, ▼ worse where both are below {SIGNIFICANT}.",
    ]


def row_entries(table: ResultTable, row: Row, style: Style) -> list[str]:
    """Return the entries of one method in the columns of all benchmarks."""
    return [entry for benchmark in table.benchmarks for entry in _entries(table, row, benchmark, style)]


def rows_by_family(table: ResultTable) -> Iterator[list[Row]]:
    """Yield the rows of each family of methods."""
    for _, rows in groupby(table.rows, key=lambda row: row.family):
        yield list(rows)


def _entries(table: ResultTable, row: Row, benchmark: str, style: Style) -> list[str]:
    """Return the entries of one method in the columns of one benchmark."""
    cell = table.cells.get((row.label, benchmark))
    columns = headings(table, benchmark)
    if cell is None:
        return [""] * len(columns)
    accuracy = _measure(cell.accuracy, style)
    entries = [accuracy + (f" ({cell.missing} missing)" if cell.missing else ""), _measure(cell.forgetting, style)]
    if "paper A %" in columns:
        published = cell.paper
        entries += (
            [
                _number(published.accuracy, published.accuracy_std),
                _number(published.forgetting, published.forgetting_std),
            ]
            if published
            else ["", ""]
        )
    if table.against:
        entries.append(_significance(cell))
    if "p over configs" in columns:
        entries.append("" if cell.config_p_value is None else _p_text(cell.config_p_value))
    if table.time:
        entries.append("–" if cell.step_time is None else f"{cell.step_time:.1f}")
    return entries


def _measure(measure: Measure, style: Style) -> str:
    return style(_number(measure.mean, measure.std), measure.rank)


def _number(mean: float, std: float | None) -> str:
    if math.isnan(mean):
        return "–"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _significance(cell: Cell) -> str:
    if cell.p_value is None or cell.gain is None:
        return ""
    mark = ("▲" if cell.gain > 0 else "▼") if _is_significant(cell.p_value, cell.config_p_value) else ""
    return f"{_p_text(cell.p_value)} {mark}".strip()


def _is_significant(p_value: float, config_p_value: float | None) -> bool:
    """Return whether both tests find a difference; with one seed they are the same test.

    >>> _is_significant(0.001, None), _is_significant(0.001, 0.004), _is_significant(0.001, 0.055)
    (True, True, False)
    """
    return p_value < SIGNIFICANT and (config_p_value is None or config_p_value < SIGNIFICANT)


def _p_text(p_value: float) -> str:
    return "<0.001" if p_value < 0.001 else f"{p_value:.3f}"
