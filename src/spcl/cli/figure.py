"""``spcl figure``."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from spcl.cli.consoles import plain_console
from spcl.cli.flags import naming_flags
from spcl.cli.grid import grid
from spcl.data.protocol import load_protocol
from spcl.errors import SpclError
from spcl.results import figures
from spcl.results.filtering import filter_runs
from spcl.results.grid_command import GridCommand
from spcl.results.records import read_runs
from spcl.runs.settings import parse_assignments

__all__ = ["figure"]


def figure(
    name: Annotated[str | None, typer.Argument(help="Which figure; without one, all are listed.")] = None,
    runs: Annotated[
        list[Path] | None, typer.Option(help="A folder of runs; may be repeated. By default results/NAME.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A .png or .svg file, or a folder for both.")] = Path("figures"),
    where: Annotated[
        list[str] | None, typer.Option(help="Only runs with this setting, e.g. scenario=class; may be repeated.")
    ] = None,
    protocol: Annotated[Path | None, typer.Option(help="For timeline: draw a protocol file, not runs.")] = None,
    make: Annotated[bool, typer.Option("--make", help="First make the runs it needs, in the (first) folder.")] = False,
    benchmark: Annotated[str | None, typer.Option(help="With --make: another benchmark than the paper's.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="With --make: where the publishers' files are.")] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", help="With --make: any setting.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="With --make: how many runs at once.")] = 1,
) -> None:
    """Draw a figure of the paper from runs, as PNG and SVG."""
    console = plain_console()
    if name is None:
        _list(console)
        return
    spec = figures.figure_spec(name)
    figures.figure_paths(spec, out)  # raises before runs are made where the figure cannot be written
    if protocol is not None and name != "timeline":
        raise SpclError(f"--protocol is for the figure 'timeline', not for {name!r}")
    default = Path("results") / name
    if make:
        _make_runs(spec.grids, runs[0] if runs else default, benchmark, data_dir, assignments or [], jobs)
    if protocol is not None:
        drawing = figures.draw_protocol(load_protocol(protocol))
    else:
        found = read_runs(*(runs or ([default] if default.is_dir() else [])))
        with naming_flags({SpclError: "--where"}):
            chosen = filter_runs(found, parse_assignments(where or []))
        drawing = figures.draw_figure(spec, chosen)
    console.print(drawing.caption, soft_wrap=True)
    for path in figures.save_drawing(drawing, out):
        console.print(str(path), style="dim", soft_wrap=True)


def _list(console: Console) -> None:
    table = Table("name", "in the paper", "what it shows", "drawn from", box=None, pad_edge=False)
    for spec in figures.FIGURES.values():
        table.add_row(spec.name, spec.number, spec.title, spec.needs)
    console.print(table)


def _make_runs(
    grids: Sequence[GridCommand],
    out: Path,
    benchmark: str | None,
    data_dir: Path | None,
    assignments: list[str],
    jobs: int,
) -> None:
    """Run the figure's grids; runs that are complete are not made again."""
    for command in grids:
        options = asdict(command) | {
            "benchmark": benchmark or command.benchmark,
            "assignments": [*command.assignments, *assignments],
        }
        grid(out=out, data_dir=data_dir, jobs=jobs, **options)
