"""``spcl export``."""

from pathlib import Path
from typing import Annotated

import typer

from spcl.cli.consoles import plain_console
from spcl.cli.flags import Plugins
from spcl.cli.model_flags import RunPath, TaskName, naming_model_flags
from spcl.runs import read_run
from spcl.runs.export import export_run

__all__ = ["export"]


def export(
    run: RunPath,
    out: Annotated[
        Path, typer.Option(help="FILE.pt2 (PyTorch) or FILE.onnx; FILE….json beside it describes inputs and classes.")
    ],
    task: TaskName = None,
    plugin: Plugins = None,
) -> None:
    """Export the model of a complete run as a program for PyTorch alone (.pt2), or as ONNX."""
    with naming_model_flags(run):
        export_run(read_run(run, plugin or ()), out, task)
    console = plain_console()
    console.print(f"wrote {out} and {out}.json", soft_wrap=True)
    if out.suffix == ".pt2":
        console.print(f"load it with: torch.export.load({str(out)!r}).module()", soft_wrap=True)
