"""The parts of the report that are about all runs together."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spcl.errors import SpclError
from spcl.methods import METHODS
from spcl.results.figures import FIGURES, FigureSpec, draw_figure
from spcl.results.figures.curves import grouped
from spcl.results.figures.style import display
from spcl.results.records import RunRecord
from spcl.results.tables.tables import Cell, Over, ResultTable, make_tables, method_order
from spcl.runs.identity import flat_settings
from spcl.runs.settings import RunSettings

__all__ = [
    "Campaign",
    "Picture",
    "Setting",
    "Tuning",
    "campaigns",
    "figures",
    "find_tunings",
    "settings_in_common",
    "settings_that_differ",
    "tables",
]


@dataclass(frozen=True)
class Campaign:
    """What was run on one benchmark in one scenario."""

    benchmark: str
    scenario: str
    methods: list[str]
    configs: list[int]
    seeds: list[int]
    complete: int
    unfinished: int
    seconds: float


def campaigns(runs: Sequence[RunRecord]) -> list[Campaign]:
    """One for each benchmark and scenario."""
    return [
        Campaign(
            benchmark=benchmark,
            scenario=scenario,
            methods=[display(name) for name in sorted({run.method for run in group}, key=method_order)],
            configs=sorted({run.config for run in group}),
            seeds=sorted({run.seed for run in group}),
            complete=sum(run.result is not None for run in group),
            unfinished=sum(run.result is None for run in group),
            seconds=sum((run.result or {}).get("seconds", {}).get("training", 0.0) for run in group),
        )
        for (benchmark, scenario), group in grouped(runs, lambda run: (run.benchmark, run.scenario)).items()
    ]


# -- settings


@dataclass(frozen=True)
class Setting:
    """A setting, the values it has among the runs, and what it means."""

    name: str
    values: list[str]
    meaning: str


def settings_in_common(runs: Sequence[RunRecord]) -> list[Setting]:
    """The settings, apart from those of methods, that all runs share."""
    return [setting for setting in _settings(runs) if len(setting.values) == 1 and "." not in setting.name]


def settings_that_differ(runs: Sequence[RunRecord]) -> list[Setting]:
    """The settings that have several values."""
    return [setting for setting in _settings(runs) if len(setting.values) > 1]


def _settings(runs: Sequence[RunRecord]) -> list[Setting]:
    values: dict[str, dict[str, None]] = {}
    meanings: dict[str, str] = {}
    for run in runs:
        for name, value in flat_settings(run.settings).items():
            values.setdefault(name, {})[_text(value)] = None
            meanings.setdefault(name, _meaning(name, run.method))
    return [Setting(name, list(found), meanings[name]) for name, found in values.items()]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value)


def _meaning(name: str, method: str) -> str:
    inner = name.removeprefix("method.")
    if inner == name:
        fields = RunSettings.model_fields
    else:
        fields = METHODS[method].Settings.model_fields if method in METHODS else {}
    return fields[inner].description or "" if inner in fields else ""


# -- tables


def tables(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The result tables for the page, with the paper's values where it has any; of one seed, over configurations."""
    over: Over = "configs" if len({run.seed for run in runs}) == 1 < len({run.config for run in runs}) else "seeds"
    return [_table(table) for table in make_tables(runs, over, paper=True)]


def _table(table: ResultTable) -> dict[str, Any]:
    published = {benchmark for (_, benchmark), cell in table.cells.items() if cell.paper}
    return {
        "title": table.title,
        "note": " ".join(table.remarks),
        "scenario": table.scenario,
        "benchmarks": [{"name": name, "paper": name in published} for name in table.benchmarks],
        "rows": [
            {
                "label": row.label,
                "method": display(row.label),
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


# -- figures


@dataclass(frozen=True)
class Picture:
    """A figure of the paper: drawn, or with the reason why it could not be."""

    spec: FigureSpec
    caption: str = ""
    image: str = ""
    problem: str = ""


def figures(runs: Sequence[RunRecord]) -> list[Picture]:
    """All figures, as images that need no other file."""
    return [_picture(spec, runs) for spec in FIGURES.values()]


def _picture(spec: FigureSpec, runs: Sequence[RunRecord]) -> Picture:
    try:
        drawing = draw_figure(spec, runs)
    except SpclError as error:
        return Picture(spec, problem=str(error))
    image = base64.b64encode(drawing.svg().encode()).decode()
    return Picture(spec, drawing.caption, f"data:image/svg+xml;base64,{image}")


# -- tuning


@dataclass(frozen=True)
class Tuning:
    """A search made by ``spcl tune``: its best trial, and Optuna's plots as Plotly figures."""

    folder: Path
    best: Mapping[str, Any]
    plots: Mapping[str, Any]


def find_tunings(folders: Sequence[Path]) -> list[Tuning]:
    """The searches in these folders and those below."""
    records = sorted({record.parent for folder in folders for record in folder.rglob("tuning.json")})
    return [
        Tuning(
            folder,
            best=_read(folder / "best.json") or {},
            plots={path.stem.replace("_", " "): _read(path) for path in sorted((folder / "plots").glob("*.json"))},
        )
        for folder in records
    ]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
