"""The report: one self-contained HTML file."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import spcl
from spcl.errors import SpclError
from spcl.files import user_errors, write_text
from spcl.results.formatting import format_ranges
from spcl.results.records import RunRecord, read_runs
from spcl.results.report.pictures import draw_pictures
from spcl.results.report.runs import pack, points_per_curve, run_details, run_row, to_columns
from spcl.results.report.summary import common_settings, differing_settings, summarise
from spcl.results.report.tables import report_tables
from spcl.results.report.tuning import find_tunings
from spcl.results.tables.methods import method_order

__all__ = ["write_report"]

SCRIPTS = ("elements.js", "charts.js", "run_list.js", "run_charts.js", "run_page.js", "navigation.js")
"""The parts of the page's script, which share one scope, in their order."""

Progress = Callable[[str], None]


def write_report(folders: Sequence[str | Path], out: str | Path, on_progress: Progress = lambda stage: None) -> Path:
    """Write a report on all runs in these folders; ``on_progress`` receives the name of each stage.

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
    on_progress("drawing figures")
    page = _render(
        folders=[str(folder) for folder in folders],
        summaries=summarise(runs),
        common=common_settings(runs),
        differing=differing_settings(runs),
        tables=report_tables(results),
        pictures=draw_pictures(results),
        tunings=tunings,
        rows=to_columns(run_row(run) for run in runs),
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
