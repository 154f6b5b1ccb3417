"""The application: all commands, and how errors are printed."""

import sys
import warnings

import typer
from rich.text import Text

from spcl import __version__
from spcl.cli import compare, data, figure, grid, methods, report, run, table, timeline, tune
from spcl.cli.consoles import careful_output, plain_console
from spcl.errors import SpclError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Parallel continual learning: train one model on many data sources at once, with tasks that come and go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("grid")(grid.grid)
app.command("tune")(tune.tune)
app.command("table")(table.table)
app.command("compare")(compare.compare)
app.command("figure")(figure.figure)
app.command("report")(report.report)
app.command("timeline")(timeline.timeline)
app.command("methods")(methods.methods)
app.add_typer(data.app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"spcl {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    """Options of all commands."""


def main() -> None:
    """Run the command; print a user error as one line on standard error and exit with status 1."""
    console = plain_console(stderr=True)

    def say(word: str, colour: str, text: object) -> None:
        console.print(Text.assemble((f"{word}:", colour), f" {text}"), soft_wrap=True)

    warnings.showwarning = lambda message, *_, **__: say("warning", "yellow", message)
    try:
        with careful_output():
            app()
    except SpclError as error:
        say("error", "red", error)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)
