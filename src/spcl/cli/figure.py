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
from spcl.results.filtering import filter_runs, parse_conditions
from spcl.results.grid_command import GridCommand
from spcl.results.records import read_runs

__all__ = ["figure"]

TIMELINE = "timeline"
"""The figure that ``--protocol`` is for."""


def figure(
    name: Annotated[str | None, typer.Argument(help="Which figure; without one, all are listed.")] = None,
    runs: Annotated[
        list[Path] | None, typer.Option(help="A folder of runs; may be repeated. By default results/NAME.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A .png, .svg or .pdf file, or a folder for PNG and SVG.")] = Path(
        "figures"
    ),
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only runs with this setting, e.g. scenario=class or method=er,soro (any); may be repeated."),
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
    with naming_flags({SpclError: "--out"}):
        figures.figure_paths(spec, out)  # raises before runs are made where the figure cannot be written
    if protocol is not None and name != TIMELINE:
        raise SpclError(f"--protocol is for the figure 'timeline', not for {name!r}")
    default = Path("results") / name
    if make:
        _make_runs(spec.grids, runs[0] if runs else default, benchmark, data_dir, assignments or [], jobs)
    if protocol is not None:
        drawing = figures.draw_protocol(load_protocol(protocol))
    else:
        drawing = _draw(spec, runs or ([default] if default.is_dir() else []), where or [])
    console.print(drawing.caption, soft_wrap=True)
    if drawing.omits_runs:
        console.print("choose other runs with --where, e.g. --where method=er,soro", soft_wrap=True)
    for path in figures.save_drawing(drawing, out):
        console.print(str(path), style="dim", soft_wrap=True)


def _list(console: Console) -> None:
    table = Table("name", "in the paper", "what it shows", "drawn from", box=None, pad_edge=False)
    for spec in figures.FIGURES.values():
        needs = f"{spec.needs} (--protocol)" if spec.name == TIMELINE else spec.needs
        table.add_row(spec.name, spec.number, spec.title, needs)
    console.print(table)


def _draw(spec: figures.FigureSpec, folders: Sequence[Path], where: Sequence[str]) -> figures.Drawing:
    """Draw the figure from the runs that ``--where`` chooses; errors about missing runs name the flags that help."""
    found = read_runs(*folders)
    with naming_flags({SpclError: "--where"}):
        chosen = filter_runs(found, parse_conditions(where))
    try:
        return figures.draw_figure(spec, chosen)
    except figures.MissingRunsError as error:
        hints = [f"--where chose {len(chosen)} of {len(found)} runs"] if len(chosen) < len(found) else []
        hints += ["--protocol draws a protocol file without runs"] if spec.name == TIMELINE else []
        raise figures.MissingRunsError("\n".join([str(error), *hints])) from error


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
