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


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="Draw them into this file, too (PNG, SVG or PDF).")] = None,
) -> None:
    """Print runs side by side, and plot them: differing settings, accuracies, stability."""
    records = []
    for run in runs:
        found = read_runs(run)
        if [record.path for record in found] != [run]:
            raise SpclError(f"{run} is not the folder of one run; 'spcl table' is for folders of many")
        records += found
    console = Console()
    console.print(comparison_table(compare_runs(records)))
    if out is not None:
        from spcl.experiments.figures.compare import compare_figure  # matplotlib takes a while to import

        out.parent.mkdir(parents=True, exist_ok=True)
        compare_figure(records).savefig(out)
        console.print(str(out), highlight=False, soft_wrap=True)
