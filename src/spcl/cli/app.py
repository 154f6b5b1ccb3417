"""The application: all commands, and how errors are printed."""

import sys
import warnings
from typing import Any, ClassVar, NoReturn

import typer
from rich.text import Text

from spcl import __version__
from spcl.cli.consoles import careful_output, plain_console
from spcl.cli.interrupts import EXIT_STATUS
from spcl.cli.lazy import LazyGroup
from spcl.errors import OtherRankError, SpclError

__all__ = ["app", "main"]


class _Commands(LazyGroup):
    summaries: ClassVar = {
        "run": "Train and evaluate one method on one configuration of a benchmark.",
        "grid": "Make every run of a comparison that is missing: methods × scenarios × configurations × seeds.",
        "tune": "Search for good settings with Optuna, scored on held-out training data and never on the test data.",
        "predict": "Predict the classes of pictures or arrays with the model of a complete run.",
        "evaluate": "Evaluate the model of a complete run on its test data, beside what the run recorded.",
        "export": "Export the model of a complete run as a program for PyTorch alone (.pt2), or as ONNX.",
        "table": "Tabulate accuracy and forgetting: methods × benchmarks, a table for each scenario.",
        "compare": "Print runs side by side, and plot them: differing settings, accuracies, stability.",
        "figure": "Draw a figure of the paper from runs, as PNG and SVG.",
        "report": "Write one HTML file with the settings, tables, figures and every run.",
        "protocol": "Write a protocol file: label sets and timelines, drawn for a benchmark or converted from YAML.",
        "serve": "Train on live sources without end, answer predictions over HTTP, and show it all on a page.",
        "timeline": "Draw when each task of a configuration trains, and when memory starts.",
        "methods": "List the methods: what they do, where they come from, and what a step costs.",
        "settings": "List every setting with its meaning, values and default, or those of a method.",
        "data": "List, download and check data sets.",
    }

    def invoke(self, ctx: Any) -> Any:
        """Run a command; on Ctrl-C, which Typer would end without a word, print that it is stopped."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _stop()


app = typer.Typer(
    cls=_Commands,
    help="Parallel continual learning: train one model on many data sources at once, with tasks that come and go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
    """Run the command; print a user error as one line on standard error and exit with status 1, after Ctrl-C 130."""
    console = plain_console(stderr=True)

    def say(word: str, colour: str, text: object) -> None:
        console.print(Text.assemble((f"{word}:", colour), f" {text}"), soft_wrap=True)

    warnings.showwarning = lambda message, *_, **__: say("warning", "yellow", message)
    try:
        with careful_output():
            app()
    except OtherRankError:
        sys.exit(1)  # that rank has said why
    except SpclError as error:
        say("error", "red", error)
        sys.exit(1)
    except KeyboardInterrupt:
        _stop()


def _stop() -> NoReturn:
    print("stopped", file=sys.stderr)
    sys.exit(EXIT_STATUS)
