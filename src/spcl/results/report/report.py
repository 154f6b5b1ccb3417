"""The report: one HTML file that needs nothing else, not even a network."""

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
from spcl.results.figures.curves import ranges
from spcl.results.records import RunRecord, read_runs
from spcl.results.report import sections
from spcl.results.report.runs import columns, pack, points_per_curve, run_details, run_row
from spcl.results.tables.tables import method_order

__all__ = ["write_report"]


def write_report(folders: Sequence[Path], out: Path, told: Callable[[str], None] = lambda stage: None) -> Path:
    """Write a report on all runs in these folders; ``told`` hears what is being done.

    The page holds everything: settings, tables beside the paper's, figures, and for every run its timeline, accuracies
    and stability. Runs are packed and drawn when looked at, so thousands of them stay usable.
    """
    if out.is_dir():
        raise SpclError(f"{out} is a folder; name the file to write, for example {out / 'report.html'}")
    told("reading runs")
    runs = sorted(read_runs(*folders), key=_order)
    if not runs:
        raise SpclError(f"there are no runs in {', '.join(map(str, folders))}; 'spcl grid' and 'spcl run' make some")
    tunings = sections.find_tunings(folders)
    searched = [tuning.folder.resolve() for tuning in tunings]
    results = [run for run in runs if not any(run.path.resolve().is_relative_to(folder) for folder in searched)]
    told("drawing figures")
    page = _page(
        folders=[str(folder) for folder in folders],
        runs=runs,
        campaigns=sections.campaigns(runs),
        common=sections.settings_in_common(runs),
        differing=sections.settings_that_differ(runs),
        tables=sections.tables(results),
        pictures=sections.figures(results),
        tunings=tunings,
        details=_details(runs, told),
    )
    with user_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    return out


def _order(run: RunRecord) -> tuple[Any, ...]:
    return run.benchmark, run.scenario != "task", method_order(run.method)


def _details(runs: Sequence[RunRecord], told: Callable[[str], None]) -> list[str]:
    points = points_per_curve(len(runs))
    packed = []
    for number, run in enumerate(runs, 1):
        told(f"run {number} of {len(runs)}")
        packed.append(pack(run_details(run, points)))
    return packed


def _page(runs: Sequence[RunRecord], **content: Any) -> str:
    from plotly.offline import get_plotlyjs  # half a second to import, for a script of four megabytes

    environment = Environment(
        loader=PackageLoader("spcl.results.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"numbers": ranges, "decimal": decimal}
    return environment.get_template("report.html").render(
        version=spcl.__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        rows=columns(run_row(run) for run in runs),
        plotly=Markup(get_plotlyjs()),
        style=Markup(_text("report.css")),
        script=Markup(_text("report.js")),
        **content,
    )


def _text(name: str) -> str:
    return files("spcl.results.report").joinpath("templates", name).read_text(encoding="utf-8")


def decimal(value: float) -> str:
    """Two digits, with a true minus sign.

    >>> decimal(-3.14159)
    '−3.14'
    """
    return f"{value:.2f}".replace("-", "−")
