"""The result tables of the report."""

from collections.abc import Sequence
from typing import Any

from spcl.results.records import RunRecord
from spcl.results.tables import ResultTable, make_tables
from spcl.results.tables.methods import display_name
from spcl.results.tables.table import Cell, Over

__all__ = ["report_tables"]


def report_tables(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the tables as plain data, with the paper's values; the deviation is over configurations for one seed."""
    over: Over = "configs" if len({run.seed for run in runs}) == 1 < len({run.config for run in runs}) else "seeds"
    return [_table(table) for table in make_tables(runs, over, paper=True)]


def _table(table: ResultTable) -> dict[str, Any]:
    published = {benchmark for (_, benchmark), cell in table.cells.items() if cell.paper}
    return {
        "title": table.title,
        "note": " ".join(table.remarks),
        "scenario": table.scenario,
        "measure": table.measure,
        "benchmarks": [{"name": name, "paper": name in published} for name in table.benchmarks],
        "rows": [
            {
                "label": row.label,
                "method": display_name(row.label),
                "family": row.family,
                "cells": {name: _cell(table.cells.get((row.label, name))) for name in table.benchmarks},
            }
            for row in table.rows
        ],
    }


def _cell(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None or not cell.runs:
        return None
    return {
        "runs": cell.runs,
        "missing": cell.missing,
        "accuracy": vars(cell.accuracy),
        "forgetting": vars(cell.forgetting),
        "paper": vars(cell.paper) if cell.paper else None,
    }
