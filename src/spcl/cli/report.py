"""``spcl report``."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from spcl.cli.consoles import plain_console
from spcl.results.report import write_report

__all__ = ["report"]


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, as made by 'spcl grid' or 'spcl run'.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML file with the settings, tables, figures and every run."""
    console = plain_console()
    with console.status("") as status:
        write_report(folders, out, on_progress=status.update)
    console.print(f"the report is in {out}", soft_wrap=True)
    if show:
        webbrowser.open(out.resolve().as_uri())
