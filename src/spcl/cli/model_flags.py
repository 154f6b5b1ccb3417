"""The arguments that the commands on a trained model share, and these in error messages."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from spcl.cli.flags import naming_flags
from spcl.errors import TaskError
from spcl.plugins import PluginError
from spcl.runs import DeviceError, UnfinishedRunError

__all__ = ["DeviceName", "RunPath", "TaskName", "naming_model_flags"]

RunPath = Annotated[Path, typer.Argument(help="The folder of a complete run.")]
TaskName = Annotated[
    str | None, typer.Option("--task", help="The samples' task; needed if the run is task-incremental.")
]
DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda, ….")]


@contextmanager
def naming_model_flags(run: Path) -> Iterator[None]:
    """Append the flag, or the command, that helps to errors of loading a run and choosing a task."""
    resume = shlex.join(["spcl", "run", "--out", str(run), "--resume"])
    flags = {UnfinishedRunError: resume, DeviceError: "--device cpu", TaskError: "--task", PluginError: "--plugin"}
    with naming_flags(flags):
        yield
