"""``spcl table``, ``spcl compare``, ``spcl figure`` and ``spcl report``: what runs show."""

import webbrowser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from spcl._util.text import PlainConsole, printable
from spcl.cli.shared import WIDE, naming_flags
from spcl.errors import SpclError

if TYPE_CHECKING:
    from spcl.results.figures import Drawing, FigureSpec, GridCommand
    from spcl.results.tables import ResultTable

AGAINST = (
    "Test every method against this one, over pairs of runs and over means of configurations (of nine, p is 0.004 or "
    "more); marks need both."
)
TIMELINE = "timeline"
"""The figure that ``--protocol`` is for."""

RunFolders = Annotated[list[Path], typer.Argument(help="Folders of runs, as made by 'spcl grid' or 'spcl run'.")]


def table(
    folders: RunFolders,
    form: Annotated[
        Literal["terminal", "markdown", "latex", "csv"],
        typer.Option("--format", help="terminal, markdown, latex or csv."),
    ] = "terminal",
    paper: Annotated[bool, typer.Option("--paper", help="The paper's values beside ours.")] = False,
    over: Annotated[
        Literal["seeds", "configs"], typer.Option(help="What the standard deviation is over: seeds or configs.")
    ] = "seeds",
    against: Annotated[str | None, typer.Option(help=AGAINST)] = None,
    time: Annotated[bool, typer.Option("--time", help="The time of a training step, in milliseconds.")] = False,
    stability: Annotated[
        bool, typer.Option("--stability", help="Instead: κ, conflicts and magnitudes of the gradients, in Markdown.")
    ] = False,
) -> None:
    """Tabulate accuracy and forgetting: methods × benchmarks, a table for each scenario."""
    from spcl.results.records import read_runs
    from spcl.results.tables import format_tables, make_tables

    records = read_runs(*folders)
    if not records:
        raise SpclError(f"there are no runs in {', '.join(map(str, folders))}; 'spcl grid' and 'spcl run' make some")
    if stability:
        from spcl.results.compare import stability_text

        typer.echo(printable(stability_text(records), keep="\n"), nl=False)
        return
    tables = make_tables(records, over, against, paper, time)
    if form == "terminal":
        _print_tables(tables)
    else:
        typer.echo(format_tables(tables, form), nl=False)


def _print_tables(tables: "list[ResultTable]") -> None:
    """Print each table, in parts where the terminal is too narrow for all its benchmarks."""
    from rich.measure import Measurement

    from spcl.results.tables import terminal_table

    console = PlainConsole(markup=True)
    styled = console.is_terminal
    if not styled:
        console.width = WIDE
    for whole in tables:
        fits = Measurement.get(console, console.options.update(max_width=WIDE), terminal_table(whole)).maximum
        parts = [whole] if fits <= console.width else [whole.only(name) for name in whole.benchmarks]
        for part in parts:
            console.print(terminal_table(part, styled))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="Draw them into this file, too (PNG, SVG or PDF).")] = None,
) -> None:
    """Print runs side by side, and plot them: differing settings, accuracies, stability."""
    from spcl.results.compare import compare, fitting_tables
    from spcl.results.records import read_runs

    path = None
    if out is not None:
        from spcl.results.figures import comparison_path

        with naming_flags({SpclError: "--out"}):
            path = comparison_path(out)
    records = []
    for run in runs:
        found = read_runs(run)
        if [record.path for record in found] != [run]:
            raise SpclError(f"{run} is not the folder of one run; 'spcl table' is for folders of many")
        records += found
    console = PlainConsole()
    for number, record in enumerate(records, 1):
        console.print(f"{number}: {record.path}", soft_wrap=True)
    for table in fitting_tables(compare(records), console):
        console.print(table)
    if path is not None:
        from spcl.results.figures import save_comparison

        save_comparison(records, path)
        console.print(str(path), soft_wrap=True)


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
    from spcl.data.protocol import load_protocol
    from spcl.results import figures

    console = PlainConsole()
    if name is None:
        _list_figures(console)
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


def _list_figures(console: Console) -> None:
    from spcl.results.figures import all_figures

    table = Table("name", "in the paper", "what it shows", "drawn from", box=None, pad_edge=False)
    for spec in all_figures():
        needs = f"{spec.needs} (--protocol)" if spec.name == TIMELINE else spec.needs
        table.add_row(spec.name, spec.number, spec.title, needs)
    console.print(table)


def _draw(spec: "FigureSpec", folders: Sequence[Path], where: Sequence[str]) -> "Drawing":
    """Draw the figure from the runs that ``--where`` chooses; errors about missing runs name the flags that help."""
    from spcl.results.figures import MissingRunsError, draw_figure
    from spcl.results.records import filter_runs, parse_conditions, read_runs

    found = read_runs(*folders)
    with naming_flags({SpclError: "--where"}):
        chosen = filter_runs(found, parse_conditions(where))
    try:
        return draw_figure(spec, chosen)
    except MissingRunsError as error:
        hints = [f"--where chose {len(chosen)} of {len(found)} runs"] if len(chosen) < len(found) else []
        hints += ["--protocol draws a protocol file without runs"] if spec.name == TIMELINE else []
        raise MissingRunsError("\n".join([str(error), *hints])) from error


def _make_runs(
    grids: "Sequence[GridCommand]",
    out: Path,
    benchmark: str | None,
    data_dir: Path | None,
    assignments: list[str],
    jobs: int,
) -> None:
    """Run the figure's grids; runs that are complete are not made again."""
    from spcl.cli.grid import grid

    for command in grids:
        options = asdict(command) | {
            "benchmark": benchmark or command.benchmark,
            "assignments": [*command.assignments, *assignments],
        }
        grid(out=out, data_dir=data_dir, jobs=jobs, **options)


def report(
    folders: RunFolders,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    against: Annotated[str | None, typer.Option(help=AGAINST)] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML file with the settings, tables, figures and every run."""
    from spcl.results.report import write_report

    console = PlainConsole()
    with console.status("") as status:
        write_report(folders, out, status.update, against)
    console.print(f"the report is in {out}", soft_wrap=True)
    if show:
        webbrowser.open(out.resolve().as_uri())
