"""``spcl data``: what data there is, getting more, checking it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from spcl.cli.consoles import plain_console
from spcl.data import DATA_NAMES, DatasetStatus, check_data, get_data, list_data

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="List, download and check data sets.")

DataDir = Annotated[Path | None, typer.Option(help="Folder of data files (otherwise $SPCL_DATA or the cache).")]
SETS = f"Data sets: {', '.join(DATA_NAMES)}."


@app.command("list")
def list_command(data_dir: DataDir = None) -> None:
    """Say which data sets are there, where, and how much of them."""
    _print(list_data(data_dir))


@app.command()
def get(names: Annotated[list[str], typer.Argument(help=SETS)], data_dir: DataDir = None) -> None:
    """Download data sets from their publishers; an interrupted download continues where it stopped."""
    for name in names:
        typer.echo(f"{name}: {get_data(name, data_dir)}")


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help=f"{SETS} All that are there, unless named.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Compare archives with the publishers' checksums and decode everything afresh."""
    stocks = check_data(names or DATA_NAMES, data_dir)
    _print(stocks)
    if any(stock.problem for stock in stocks if names or stock.path):
        raise typer.Exit(1)


def _print(stocks: Iterable[DatasetStatus]) -> None:
    table = Table("data set", "training + test images", "classes", "state", Column("where", overflow="fold"))
    for stock in stocks:
        counts = f"{stock.train:,} + {stock.test:,}" if stock.train else ""
        table.add_row(stock.name, counts, str(stock.classes or ""), _state(stock), str(stock.path or ""))
    console = plain_console()
    console.print(table)
    for stock in stocks:
        if stock.problem:
            console.print(f"{stock.name}: {stock.problem}")


def _state(stock: DatasetStatus) -> str:
    if stock.path is None:
        return "not here"
    if stock.problem:
        return "problem"
    state = "complete" if stock.complete else "part"
    return f"{state}, original" if stock.original else state
