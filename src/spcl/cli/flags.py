"""The flags that several commands share, and the way from flags to settings."""

from pathlib import Path
from typing import Annotated, Any

import typer

from spcl.runs.settings import absolute_paths

__all__ = ["DataDir", "Device", "Fit", "Preset", "Protocol", "settings_from"]

Preset = Annotated[str | None, typer.Option(help="default, or paper (network details as published).")]
Protocol = Annotated[Path | None, typer.Option(help="A protocol file with label sets and timelines.")]
Fit = Annotated[bool, typer.Option("--fit", help="Rescale a timeline that does not fit the data.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, ….")]
DataDir = Annotated[Path | None, typer.Option(help="Where the publishers' files are.")]


def settings_from(**flags: Any) -> dict[str, Any]:
    """The flags that were given, as settings.

    >>> settings_from(seed=0, benchmark=None, fit=False)
    {'seed': 0, 'fit': False}
    """
    return absolute_paths({name: flag for name, flag in flags.items() if flag is not None})
