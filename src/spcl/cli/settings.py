"""``spcl settings``."""

from collections.abc import Sequence
from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from spcl.cli.consoles import plain_console
from spcl.cli.flags import Plugins, load_plugin_flags
from spcl.runs.settings_page import Setting, method_settings, named_settings, run_settings, settings_page

__all__ = ["settings"]


def settings(
    method: Annotated[str | None, typer.Argument(help="Show the settings of this method instead.")] = None,
    plugin: Plugins = None,
    form: Annotated[
        Literal["terminal", "markdown"], typer.Option("--format", help="terminal, or markdown: a page of all settings.")
    ] = "terminal",
) -> None:
    """List every setting with its meaning, values and default, or those of a method."""
    load_plugin_flags(plugin)
    if form == "markdown":
        typer.echo(settings_page(), nl=False)
        return
    console = plain_console()
    if method is not None:
        console.print(_table(method_settings(method)))
        return
    for title, listed in run_settings().items():
        console.print(Text(f"{title}\n", "bold"))
        console.print(_table(listed), "")
    for setting, things in named_settings().items():
        console.print(Text(f"Names for {setting}\n", "bold"))
        console.print(_names(things), "")


def _names(things: Sequence[tuple[str, str, list[Setting]]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for name, summary, options in things:
        shown = f" Options: {', '.join(map(str, options))}." if options else ""
        table.add_row(name, Text.assemble(summary.replace("``", ""), (shown, "dim")))
    return table


def _table(listed: list[Setting]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning and values", ratio=1)
    for each in listed:
        table.add_row(each.name, each.default, Text.assemble(each.meaning, (f" ({each.values})", "dim")))
    return table
