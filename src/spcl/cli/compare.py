"""``spcl compare``."""

from pathlib import Path
from typing import Annotated

import typer

from spcl.cli.consoles import plain_console
from spcl.cli.flags import naming_flags
from spcl.errors import SpclError
from spcl.results.compare import compare as compare_runs
from spcl.results.compare import comparison_table
from spcl.results.figures import comparison_path, save_comparison
from spcl.results.records import read_runs

__all__ = ["compare"]


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="Draw them into this file, too (PNG, SVG or PDF).")] = None,
) -> None:
    """Print runs side by side, and plot them: differing settings, accuracies, stability."""
    with naming_flags({SpclError: "--out"}):
        path = None if out is None else comparison_path(out)
    records = []
    for run in runs:
        found = read_runs(run)
        if [record.path for record in found] != [run]:
            raise SpclError(f"{run} is not the folder of one run; 'spcl table' is for folders of many")
        records += found
    console = plain_console()
    console.print(comparison_table(compare_runs(records)))
    if path is not None:
        save_comparison(records, path)
        console.print(str(path), soft_wrap=True)
