"""``spcl export``."""

from pathlib import Path
from typing import Annotated

import typer

from spcl.cli.consoles import plain_console
from spcl.cli.model_flags import RunPath, TaskName, naming_model_flags
from spcl.runs import read_run
from spcl.runs.export import ExportFormat, export_run

__all__ = ["export"]


def export(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="The file to write; FILE.json beside it describes inputs and classes.")],
    task: TaskName = None,
    form: Annotated[
        ExportFormat | None, typer.Option("--format", help="torch or onnx; by default onnx for FILE.onnx, else torch.")
    ] = None,
) -> None:
    """Export the model of a complete run as a program for PyTorch alone (.pt2), or as ONNX."""
    by_suffix: ExportFormat = "onnx" if out.suffix == ".onnx" else "torch"
    with naming_model_flags(run):
        export_run(read_run(run), out, task, form or by_suffix)
    console = plain_console()
    console.print(f"wrote {out} and {out}.json", soft_wrap=True)
    if (form or by_suffix) == "torch":
        console.print(f"load it with: torch.export.load({str(out)!r}).module()", soft_wrap=True)
