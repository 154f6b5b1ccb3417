"""``spcl table``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement

from spcl.errors import SpclError
from spcl.results.records import read_runs
from spcl.results.tables import ResultTable, make_tables
from spcl.results.tables.formats import TableFormat, format_tables, terminal_table
from spcl.results.tables.stability import stability_text
from spcl.results.tables.table import Over

__all__ = ["table"]

AGAINST = (
    "Test every method against this one, over pairs of runs and over means of configurations (of nine, p is 0.004 or "
    "more); marks need both."
)
WIDE = 400  # the width of lines where the output is no terminal


def table(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, as made by 'spcl grid'.")],
    form: Annotated[TableFormat, typer.Option("--format", help="terminal, markdown, latex or csv.")] = "terminal",
    paper: Annotated[bool, typer.Option("--paper", help="The paper's values beside ours.")] = False,
    over: Annotated[Over, typer.Option(help="What the standard deviation is over: seeds or configs.")] = "seeds",
    against: Annotated[str | None, typer.Option(help=AGAINST)] = None,
    time: Annotated[bool, typer.Option("--time", help="The time of a training step, in milliseconds.")] = False,
    stability: Annotated[
        bool, typer.Option("--stability", help="Instead: κ, conflicts and magnitudes of the gradients, in Markdown.")
    ] = False,
) -> None:
    """Tabulate accuracy and forgetting: methods × benchmarks, a table for each scenario."""
    records = read_runs(*folders)
    if not records:
        raise SpclError(f"there are no runs in {', '.join(map(str, folders))}; 'spcl grid' and 'spcl run' make some")
    if stability:
        typer.echo(stability_text(records), nl=False)
        return
    tables = make_tables(records, over, against, paper, time)
    if form == "terminal":
        _print(tables)
    else:
        typer.echo(format_tables(tables, form), nl=False)


def _print(tables: list[ResultTable]) -> None:
    """Print each table, in parts where the terminal is too narrow for all its benchmarks."""
    styled = Console().is_terminal
    console = Console() if styled else Console(width=WIDE)
    for whole in tables:
        fits = Measurement.get(console, console.options.update(max_width=WIDE), terminal_table(whole)).maximum
        parts = [whole] if fits <= console.width else [whole.only(name) for name in whole.benchmarks]
        for part in parts:
            console.print(terminal_table(part, styled))
