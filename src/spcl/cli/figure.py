"""``spcl figure``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from spcl.cli.consoles import plain_console
from spcl.cli.flags import naming_flags
from spcl.cli.grid import grid
from spcl.data.protocol import load_protocol
from spcl.errors import SpclError
from spcl.results.records import read_runs

if TYPE_CHECKING:  # loading matplotlib takes a while, which only those who draw should wait for
    from spcl.results.figures import Drawing, FigureSpec

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
    from spcl.results.figures import figure_paths, figure_spec, save_drawing

    console = plain_console()
    if name is None:
        _list(console)
        return
    spec = figure_spec(name)
    figure_paths(spec, out)  # what is wrong with it should not be told after hours of runs
    usual = Path("results") / name
    if make:
        _make(spec, runs[0] if runs else usual, benchmark, data_dir, assignments or [], jobs)
    folders = runs or ([usual] if usual.is_dir() else [])
    drawing = _draw_protocol(spec, protocol) if protocol else _draw(spec, folders, where or [])
    console.print(drawing.caption, soft_wrap=True)
    for path in save_drawing(drawing, out):
        console.print(str(path), style="dim", soft_wrap=True)


def _list(console: Console) -> None:
    from spcl.results.figures import FIGURES

    table = Table("name", "in the paper", "what it shows", "drawn from", box=None, pad_edge=False)
    for spec in FIGURES.values():
        table.add_row(spec.name, spec.number, spec.title, spec.needs)
    console.print(table)


def _make(
    spec: "FigureSpec", out: Path, benchmark: str | None, data_dir: Path | None, assignments: list[str], jobs: int
) -> None:
    """What the commands of the figure's recipes do; runs that are there are not made again."""
    for recipe in spec.recipes:
        options = asdict(recipe) | {
            "benchmark": benchmark or recipe.benchmark,
            "assignments": [*recipe.assignments, *assignments],
        }
        grid(out=out, data_dir=data_dir, jobs=jobs, **options)


def _draw(spec: "FigureSpec", folders: list[Path], where: list[str]) -> "Drawing":
    from spcl.results.figures import draw_figure, select_runs

    records = read_runs(*folders)
    with naming_flags({SpclError: "--where"}):
        chosen = select_runs(records, where)
    return draw_figure(spec, chosen)


def _draw_protocol(spec: "FigureSpec", protocol: Path) -> "Drawing":
    from spcl.results.figures import draw_protocol

    if spec.name != "timeline":
        raise SpclError(f"--protocol is for the figure 'timeline', not for {spec.name!r}")
    return draw_protocol(load_protocol(protocol))
