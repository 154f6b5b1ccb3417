"""A group of commands that are imported when they are called, so that ``--help`` does not wait for PyTorch."""

from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from spcl.cli.interrupts import exit_on_interrupt
from spcl.errors import SpclError

__all__ = ["LazyGroup"]

EXTRAS = {
    "matplotlib": "report",
    "plotly": "report",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}
"""The extra that brings a library without which some command cannot be imported."""


class LazyGroup(TyperGroup):
    """A command group that knows its commands by name and summary only.

    The command NAME is the function ``NAME``, or the Typer application ``app``, of the module ``spcl.cli.NAME``.
    """

    summaries: ClassVar[dict[str, str]]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=summary) for name, summary in self.summaries.items()}
        self._is_listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; in the list of all commands only its summary is needed."""
        if self._is_listing or cmd_name not in self.commands:
            return self.commands.get(cmd_name)
        return _load(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without importing any command."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False


def _load(name: str) -> TyperCommand | TyperGroup:
    with exit_on_interrupt():
        module = _module(name)
    if hasattr(module, "app"):
        group = typer.main.get_group(module.app)
        group.name = name
        return group
    single = typer.Typer(add_completion=False)
    single.command(name)(getattr(module, name))
    return typer.main.get_command(single)  # type: ignore[return-value]


def _module(name: str) -> ModuleType:
    try:
        return import_module(f"spcl.cli.{name}")
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise SpclError(
            f'{library} is not installed, and {name} needs it; run: pip install "spcl[{EXTRAS[library]}]"'
        ) from error
