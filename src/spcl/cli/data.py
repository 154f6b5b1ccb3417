"""``spcl data``: list, download and check data sets."""

import textwrap
from collections.abc import Iterable
from typing import Annotated

import typer

from spcl.cli.consoles import plain_console
from spcl.cli.flags import DataDir
from spcl.data import DATA_NAMES, DatasetStatus, check_data, get_data, list_data

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="List, download and check data sets.")

NAME_WIDTH = 2 + max(map(len, DATA_NAMES))
INDENT = " " * NAME_WIDTH
SETS = f"Data sets: {', '.join(DATA_NAMES)}."


@app.command("list")
def list_command(data_dir: DataDir = None) -> None:
    """List the data sets: which are available, where, and whether they are complete."""
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
    statuses = check_data(names or DATA_NAMES, data_dir)
    _print(statuses)
    if any(status.problem for status in statuses if names or status.path):
        raise typer.Exit(1)


def _print(statuses: Iterable[DatasetStatus]) -> None:
    """Print each data set with its path and its problem below it; paths are never broken."""
    console = plain_console()
    for status in statuses:
        counts = f"{status.train:,} + {status.test:,} images, {status.classes} classes" if status.train else ""
        console.print(f"{status.name:{NAME_WIDTH}}{', '.join(filter(None, [_state(status), counts]))}", soft_wrap=True)
        if status.path:
            console.print(f"{INDENT}{status.path}", soft_wrap=True)
        if status.problem:
            console.print(_indented(status.problem, console.width), soft_wrap=True)


def _indented(text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _state(status: DatasetStatus) -> str:
    if status.path is None:
        return "not here"
    if status.problem:
        return "problem"
    state = "complete" if status.complete else "part"
    return f"{state}, original" if status.original else state
