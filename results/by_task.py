"""Final accuracy by the order in which tasks begin: python results/by_task.py FOLDER…

The folders hold unpacked records of runs with equally many tasks. A bias towards recent classes shows as an accuracy
that rises from the first task to the last.
"""

import sys
from collections import defaultdict
from statistics import mean

from rich.console import Console
from rich.table import Table

from spcl.results.records import complete_runs, read_runs


def main() -> None:
    """Print a row for every variant of a method, in per cent."""
    rows = defaultdict(list)
    for run in complete_runs(read_runs(*sys.argv[1:])):
        by_order = sorted(run.result.tasks.items(), key=lambda item: int(item[0].rpartition("-")[2]))
        rows[run.scenario, run.label].append([accuracy.final for _, accuracy in by_order])
    table = Table("scenario", "method", "runs", title="Final accuracy by task")
    for number in range(len(next(iter(rows.values()))[0])):
        table.add_column(f"task {number}", justify="right")
    for names, runs in sorted(rows.items()):
        table.add_row(*names, str(len(runs)), *(f"{mean(task):.1f}" for task in zip(*runs, strict=True)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
