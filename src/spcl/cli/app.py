"""The application: its commands, which are imported when they are called, and how errors are printed."""

import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from spcl import __version__
from spcl._util.text import PlainConsole
from spcl.cli import INTERRUPTED, exit_on_interrupt
from spcl.errors import OtherRankError, SpclError, install_command

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Train and evaluate one method on one configuration of a benchmark."),
    "grid": ("grid", "Make every run of a comparison that is missing: methods × scenarios × configurations × seeds."),
    "tune": (
        "grid",
        "Search for good settings with Optuna, scored on held-out training data and never on the test data.",
    ),
    "predict": ("model", "Predict the classes of pictures or arrays with the model of a complete run or a service."),
    "evaluate": ("model", "Evaluate the model of a complete run on its test data, beside what the run recorded."),
    "bundle": ("model", "Write a complete run to one .zip archive to send: settings, plug-ins, result and model."),
    "unbundle": ("model", "Unpack an archive of 'spcl bundle' to a new folder; nothing in it is run."),
    "export": (
        "model",
        "Export the model of a complete run or a service as a program for PyTorch alone (.pt2), or as ONNX.",
    ),
    "table": ("results", "Tabulate accuracy and forgetting: methods × benchmarks, a table for each scenario."),
    "compare": ("results", "Print runs side by side, and plot them: differing settings, accuracies, stability."),
    "figure": ("results", "Draw a figure of the paper from runs, as PNG and SVG."),
    "report": ("results", "Write one HTML file with the settings, tables, figures and every run."),
    "protocol": (
        "protocol",
        "Write a protocol file: label sets and timelines, drawn for a benchmark or converted from YAML.",
    ),
    "serve": ("run", "Train on live sources without end, answer predictions over HTTP, and show it all on a page."),
    "timeline": ("protocol", "Draw when each task of a configuration trains, and when memory starts."),
    "methods": ("listing", "List the methods: what they do, where they come from, and what a step costs."),
    "settings": ("listing", "List every setting of a run, or of a method, with its meaning, values and default."),
    "data": ("listing", "List, download and check data sets."),
}
"""The commands: the module of the function, or of the Typer application, of this name, and the summary."""

EXTRAS = {
    "matplotlib": "report",
    "jinja2": "report",
    "plotly": "report",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}
"""The extra that brings a library which some command needs."""


class _Commands(TyperGroup):
    """The commands, which the list of all commands shows without importing them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()}
        self._is_listing = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse empty arguments: shells make them of variables that are not set, and an empty path is this folder."""
        for before, word in pairwise(["", *args]):
            if word == "" or re.fullmatch(r"--[\w-]+=", word):
                name = next((each.rstrip("=") for each in (word, before) if each.startswith("--")), "an argument")
                raise SpclError(f"{name} is empty; give it a value, or leave it out")
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; in the list of all commands only its summary is needed."""
        if self._is_listing or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        with exit_on_interrupt():
            module = import_module(f"spcl.cli.{COMMANDS[cmd_name][0]}")
        called = getattr(module, cmd_name)
        if isinstance(called, typer.Typer):
            group = typer.main.get_group(called)
            group.name = cmd_name
            for each in group.commands.values():
                each.callback = _after_imports(each.callback)
            return group
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(called)
        command = typer.main.get_command(single)
        command.callback = _after_imports(command.callback)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without importing any command."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False

    def invoke(self, ctx: Any) -> Any:
        """Run a command; name the extra that it lacks, and print that it is stopped on Ctrl-C."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            library = (error.name or "").partition(".")[0]
            if library not in EXTRAS:
                raise
            raise SpclError(f"{library} is not installed; run: {install_command(EXTRAS[library])}") from error
        except KeyboardInterrupt:  # which Typer would end without a word
            _stop()


def _after_imports(called: Callable[..., Any] | None) -> Callable[..., Any]:
    """Import the slow libraries before a command is called: its help has no use for them, and Ctrl-C ends an import."""

    def call(**arguments: Any) -> Any:
        assert called is not None
        with exit_on_interrupt():
            import_module("spcl.runs")
        return called(**arguments)

    return call


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
    console = PlainConsole(stderr=True)

    def say(word: str, colour: str, text: object) -> None:
        console.print(Text.assemble((f"{word}:", colour), f" {text}"), soft_wrap=True)

    warnings.showwarning = lambda message, *_, **__: say("warning", "yellow", message)
    try:
        with _careful_output():
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
    sys.exit(INTERRUPTED)


@contextmanager
def _careful_output() -> Iterator[None]:
    """Print ``?`` for characters that the output cannot encode; raise a user error if it cannot be written."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # Python's own flush at exit is too late for a one-line error
    except OSError as error:
        if error.filename is not None:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)  # for what is left, which Python flushes once more at exit
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise SpclError(f"cannot write the output: {error.strerror}; send it somewhere else") from error
