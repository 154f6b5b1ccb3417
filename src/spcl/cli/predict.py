"""``spcl predict``."""

import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from spcl.cli.consoles import plain_console
from spcl.cli.flags import Plugins
from spcl.cli.model_flags import DeviceName, RunPath, TaskName, naming_model_flags
from spcl.errors import DataError
from spcl.runs import read_run
from spcl.runs.identity import flat_settings
from spcl.runs.prediction import Row, check_task, predict_files

__all__ = ["predict"]

WIDE = 400  # the width of lines where the output is no terminal
TEXTS = ("file", "task", "class")
UNSAID = {"index": None, "rank": 1}  # a column of the table that holds nothing else is left out


def predict(
    run: RunPath,
    files: Annotated[list[Path], typer.Argument(help="Pictures, folders of pictures, .npy, or .npz with an array x.")],
    task: TaskName = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to give for a sample.")] = 1,
    form: Annotated[
        Literal["table", "csv", "json"], typer.Option("--format", help="table, csv, or json (an object a line).")
    ] = "table",
    device: DeviceName = "auto",
    plugin: Plugins = None,
) -> None:
    """Predict the classes of pictures or arrays with the model of a complete run."""
    errors: list[DataError] = []

    def report(error: DataError) -> None:
        errors.append(error)
        plain_console(stderr=True).print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)

    with naming_model_flags(run):
        trained = read_run(run, plugin or ())
        check_task(trained, task)
        rows = predict_files(trained, trained.learner(device), files, task=task, top=top, on_error=report)
        {"table": _print_table, "csv": _print_csv, "json": _print_json}[form](rows)
    if errors:
        raise typer.Exit(1)


def _print_table(rows: Iterable[Row]) -> None:
    shown = list(map(flat_settings, rows))
    if not shown:
        return
    columns = [name for name in shown[0] if not all(row[name] == UNSAID.get(name, "") for row in shown)]
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in TEXTS else "right", overflow="fold")
    for row in shown:
        table.add_row(*(_cell(row[name]) for name in columns))
    console = plain_console()
    (console if console.is_terminal else plain_console(width=WIDE)).print(table)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def _print_csv(rows: Iterable[Row]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for number, row in enumerate(map(flat_settings, rows)):
        if number == 0:
            writer.writerow(row)
        writer.writerow(row.values())


def _print_json(rows: Iterable[Row]) -> None:
    for row in rows:
        typer.echo(json.dumps(row, ensure_ascii=False))
