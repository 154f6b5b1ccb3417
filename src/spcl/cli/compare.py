"""``spcl compare``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spcl.errors import SpclError
from spcl.experiments.compare import compare as compare_runs
from spcl.experiments.compare import comparison_table
from spcl.experiments.index import read_runs

__all__ = ["compare"]


def compare(runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")]) -> None:
    """Print runs side by side: differing settings, accuracies, stability."""
    records = []
    for run in runs:
        found = read_runs(run)
        if [record.path for record in found] != [run]:
            raise SpclError(f"{run} is not the folder of one run; 'spcl table' is for folders of many")
        records += found
    console = Console()
    console.print(comparison_table(compare_runs(records)))
