"""The report: one self-contained HTML file."""

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import spcl
from spcl._util.files import read_json, user_errors, write_text
from spcl.errors import SpclError
from spcl.methods import METHODS
from spcl.results.compare import MEASURES
from spcl.results.figures import FigureSpec, all_figures, draw_figure
from spcl.results.names import display_name, format_ranges, format_value, method_order
from spcl.results.records import RunRecord, complete_runs, group_by, read_runs
from spcl.results.tables import (
    Cell,
    Over,
    ResultTable,
    make_tables,
    p_text,
    significance_notes,
    significance_text,
    source_measures,
)
from spcl.runs.records import SOURCE_MEASURES, RunResult
from spcl.runs.settings import RunSettings, shown_settings

# -- page

SCRIPTS = ("elements.js", "charts.js", "run_list.js", "run_charts.js", "run_page.js", "navigation.js")
"""The parts of the page's script, which share one scope, in their order."""

Progress = Callable[[str], None]


def write_report(
    folders: Sequence[str | Path],
    out: str | Path,
    on_progress: Progress = lambda stage: None,
    against: str | None = None,
) -> Path:
    """Write a report on all runs in these folders; ``on_progress`` receives the name of each stage.

    ``against`` names a method that the tables test every other one against, as in `make_tables`.

    The page holds everything: settings, tables beside the paper's, figures, and for every run its timeline, accuracies
    and stability. Runs are packed and drawn when looked at, so thousands of them stay usable.
    """
    out = Path(out)
    if out.is_dir():
        raise SpclError(f"{out} is a folder; name the file to write, for example {out / 'report.html'}")
    on_progress("reading runs")
    runs = sorted(read_runs(*folders), key=_sort_key)
    if not runs:
        raise SpclError(f"there are no runs in {', '.join(map(str, folders))}; 'spcl grid' and 'spcl run' make some")
    tunings = find_tunings(folders)
    searched = [tuning.folder.resolve() for tuning in tunings]
    results = [run for run in runs if not any(run.path.resolve().is_relative_to(folder) for folder in searched)]
    groups, settings = group_by(runs, lambda run: (run.benchmark, run.scenario)), _settings(runs)
    on_progress("drawing figures")
    page = _render(
        folders=[str(folder) for folder in folders],
        summaries=[_summary(*key, group) for key, group in groups.items()],
        common=[setting for setting in settings if len(setting.values) == 1 and "." not in setting.name],
        differing=[setting for setting in settings if len(setting.values) > 1],
        tables=report_tables(results, against),
        pictures=[_picture(spec, results) for spec in all_figures()],
        tunings=tunings,
        rows=to_columns([run_row(run) for run in runs]),
        details=_details(runs, on_progress),
    )
    with user_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    return out


def _sort_key(run: RunRecord) -> tuple[Any, ...]:
    return run.benchmark, run.scenario != "task", method_order(run.method)


def _details(runs: Sequence[RunRecord], on_progress: Progress) -> list[str]:
    points = points_per_curve(len(runs))
    packed = []
    for number, run in enumerate(runs, 1):
        on_progress(f"run {number} of {len(runs)}")
        packed.append(pack(run_details(run, points)))
    return packed


def _render(**content: Any) -> str:
    from plotly.offline import get_plotlyjs  # slow to import

    environment = Environment(
        loader=PackageLoader("spcl.results.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"numbers": format_ranges, "decimal": _decimal}
    return environment.get_template("report.html").render(
        version=spcl.__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotly=Markup(get_plotlyjs()),
        style=Markup(_template("report.css")),
        script=Markup("\n".join(map(_template, SCRIPTS))),
        **content,
    )


def _template(name: str) -> str:
    return files("spcl.results.report").joinpath("templates", name).read_text(encoding="utf-8")


def _decimal(value: float) -> str:
    """Return a number with two decimals and a true minus sign.

    >>> _decimal(-3.14159)
    '−3.14'
    """
    return f"{value:.2f}".replace("-", "−")


# -- summary


@dataclass(frozen=True)
class BenchmarkSummary:
    """The runs on one benchmark in one scenario, in numbers."""

    benchmark: str
    scenario: str
    methods: list[str]
    configs: list[int]
    seeds: list[int]
    complete: int
    unfinished: int
    seconds: float


@dataclass(frozen=True)
class Setting:
    """A setting, its values among the runs, and its description."""

    name: str
    values: list[str]
    description: str


def _summary(benchmark: str, scenario: str, runs: Sequence[RunRecord]) -> BenchmarkSummary:
    complete = complete_runs(runs)
    return BenchmarkSummary(
        benchmark=benchmark,
        scenario=scenario,
        methods=[display_name(name) for name in sorted({run.method for run in runs}, key=method_order)],
        configs=sorted({run.config for run in runs}),
        seeds=sorted({run.seed for run in runs}),
        complete=len(complete),
        unfinished=len(runs) - len(complete),
        seconds=sum(run.result.seconds.get("training", 0.0) for run in complete),
    )


def _settings(runs: Sequence[RunRecord]) -> list[Setting]:
    values: dict[str, dict[str, None]] = {}
    descriptions: dict[str, str] = {}
    for run in runs:
        for name, value in shown_settings(run.settings).items():
            values.setdefault(name, {})["–" if value is None else format_value(value)] = None
            descriptions.setdefault(name, _description(name, run.method))
    return [Setting(name, list(found), descriptions[name]) for name, found in values.items()]


def _description(name: str, method: str) -> str:
    inner = name.removeprefix("method.")
    if inner == name:
        fields = RunSettings.model_fields
    else:
        fields = METHODS[method].Settings.model_fields if method in METHODS else {}
    return fields[inner].description or "" if inner in fields else ""


# -- tables


def report_tables(runs: Sequence[RunRecord], against: str | None = None) -> list[dict[str, Any]]:
    """Return the tables as plain data, with the paper's values; the deviation is over configurations for one seed."""
    over: Over = "configs" if len({run.seed for run in runs}) == 1 < len({run.config for run in runs}) else "seeds"
    return [_table(table) for table in make_tables(runs, over, against, paper=True)]


def _table(table: ResultTable) -> dict[str, Any]:
    cells = [(benchmark, cell) for (_, benchmark), cell in table.cells.items()]
    published = {benchmark for benchmark, cell in cells if cell.paper}
    at_any_time = {benchmark for benchmark, cell in cells if cell.anytime}
    reference = display_name(table.against) if table.against else ""
    significance = significance_notes(table, reference) if reference else []
    return {
        "title": table.title,
        "note": " ".join([*table.remarks, *significance]),
        "against": reference,
        "by_config": any(cell.config_p_value is not None for _, cell in cells),
        "scenario": table.scenario,
        "measure": table.measure,
        "benchmarks": [
            {
                "name": name,
                "paper": name in published,
                "anytime": name in at_any_time,
                "of_sources": [_column(table, measure) for measure in source_measures(table, name)],
            }
            for name in table.benchmarks
        ],
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


def _column(table: ResultTable, name: str) -> dict[str, str]:
    """Return the heading of a measure of sources."""
    measure = SOURCE_MEASURES[name]
    return {"name": name, "heading": measure.short, "meaning": measure.meaning.format(table.measure)}


def _cell(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None or not cell.runs:
        return None
    return {
        "runs": cell.runs,
        "missing": cell.missing,
        "accuracy": vars(cell.accuracy),
        "anytime": vars(cell.anytime) if cell.anytime else None,
        "forgetting": vars(cell.forgetting),
        "of_sources": {name: vars(value) for name, value in cell.of_sources.items()},
        "p": significance_text(cell),
        "p_over_configs": p_text(cell.config_p_value),
        "paper": vars(cell.paper) if cell.paper else None,
    }


# -- pictures


@dataclass(frozen=True)
class Picture:
    """A figure of the paper: its image as a data URL and caption, or the reason why there is none."""

    spec: FigureSpec
    caption: str = ""
    image: str = ""
    problem: str = ""


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


def find_tunings(folders: Sequence[str | Path]) -> list[Tuning]:
    """Return the searches in these folders and those below."""
    records = sorted({record.parent for folder in folders for record in Path(folder).rglob("tuning.json")})
    return [
        Tuning(
            folder,
            best=read_json(folder / "best.json") or {},
            plots={path.stem.replace("_", " "): read_json(path) for path in sorted((folder / "plots").glob("*.json"))},
        )
        for folder in records
    ]


# -- runs: a row of the list, and curves, thinned and packed

MOST_POINTS, FEWEST_POINTS, ALL_POINTS = 200, 40, 100_000


def points_per_curve(runs: int) -> int:
    """Return the number of points of a curve that keeps a report of many runs reasonably small.

    >>> points_per_curve(10), points_per_curve(1000), points_per_curve(10_000)
    (200, 100, 40)
    """
    return max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(runs, 1)))


def run_row(run: RunRecord) -> dict[str, Any]:
    """Return the run's row in the list of runs; the results of an unfinished run are None."""
    result = run.result
    return {
        "benchmark": run.benchmark,
        "scenario": run.scenario,
        "label": run.label,
        "method": display_name(run.label),
        "config": run.config,
        "seed": run.seed,
        "accuracy": _rounded(result.accuracy, digits=12) if result else None,  # the page rounds as the tables do
        "measure": result.measure if result else "accuracy",
        "forgetting": _rounded(result.forgetting, digits=12) if result else None,
        "steps": result.steps if result else None,
        "seconds": _rounded(result.seconds.get("training")) if result else None,
    }


def run_details(run: RunRecord, points: int) -> dict[str, Any]:
    """Return everything that the page of a run shows."""
    details: dict[str, Any] = {"path": str(run.path), "settings": shown_settings(run.settings)}
    if run.result is not None:
        details |= run.result.model_dump(include={"tasks", "environment", "left_out"})
        details["more"] = _more(run.result)
        if points == MOST_POINTS and (result := run.full_result()) is not None:  # not in reports of very many runs
            details |= result.model_dump(include={"confusion", "class_names"})
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


def _more(result: RunResult) -> dict[str, Any]:
    """Return what a run with several sources measured besides: means by title, scores by source."""
    measures = {SOURCE_MEASURES[name].title.format(result.measure): value for name, value in result.of_sources.items()}
    measures |= {f"{result.measure} of {task}": scores.final for task, scores in result.by_task.items()}
    scores = {"unseen": result.unseen, "prequential": result.prequential, "first": result.first}
    return {
        "measures": {title: _rounded(value) for title, value in measures.items()},
        "task_of": result.task_of,
        **{name: {source: _rounded(value) for source, value in each.items()} for name, each in scores.items()},
    }


def _evaluations(entries: Sequence[Mapping[str, Any]], tasks: Sequence[str], points: int) -> dict[str, Any]:
    """Return accuracies over time: all evaluations at the end of a task, and as many ``points`` of the others."""
    evaluations = [entry for entry in entries if entry["kind"] == "evaluation"]
    between = [number for number, entry in enumerate(evaluations) if not entry["ended"]]
    kept = {between[index] for index in _spread_indices(len(between), points)}
    shown = [entry for number, entry in enumerate(evaluations) if entry["ended"] or number in kept]
    return {
        "step": [entry["step"] for entry in shown],
        "ended": [entry["ended"] for entry in shown],
        "accuracy": [[_rounded(entry["accuracy"].get(task)) for entry in shown] for task in tasks],
    }


def _stability(steps: Sequence[Mapping[str, Any]], points: int) -> dict[str, Any]:
    """Return the three measures before and after adjustment, at evenly spread steps with two gradients or more."""
    measured = [entry for entry in steps if entry["before"] or entry["after"]]
    chosen = [measured[index] for index in _spread_indices(len(measured), points)]
    curves = {
        when: {measure: [_rounded((entry[when] or {}).get(measure)) for entry in chosen] for measure in MEASURES}
        for when in ("before", "after")
    }
    return {"step": [entry["step"] for entry in chosen], "of": len(measured), **curves}


def _spread_indices(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spread indices below ``count``, with the first and the last.

    >>> _spread_indices(3, 10), _spread_indices(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _rounded(value: float | None, digits: int = 5) -> float | None:
    """Return a number with few digits, None if it is not finite.

    >>> _rounded(91.062499), _rounded(float("inf"))
    (91.062, None)
    """
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def pack(content: Mapping[str, Any]) -> str:
    """Return compressed JSON as text, for a browser's ``atob``, ``DecompressionStream`` and ``JSON.parse``."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def to_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns.

    >>> to_columns([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    {'a': [1, 3], 'b': [2, 4]}
    """
    return {name: [row[name] for row in rows] for name in rows[0]}
