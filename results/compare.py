"""How far runs differ that were made again: python results/compare.py OLD_FOLDER NEW_FOLDER

Both hold unpacked records of the same settings, configurations and seeds, by another machine or version. As nothing but
rounding is different, this is how much of an accuracy means something: beside it stands how far seeds are apart.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from math import pi
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from spcl.results.records import CompleteRun, complete_runs, read_runs

Pair = tuple[CompleteRun, CompleteRun]
HEADINGS = ("runs", "A old", "A new", "of a mean", "of a run", "at most", "between seeds")


def main() -> None:
    """Print a table of all methods, in points of final accuracy."""
    table = Table(title="Final accuracy of runs that were made again, and how far it differs")
    table.add_column("method")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    rows = defaultdict(list)
    for old, new in pairs(*sys.argv[1:3]):
        rows[f"{new.scenario} {new.label}"].append((old, new))
    for label, found in sorted(rows.items()):
        table.add_row(label, *row(found))
    Console(width=120).print(table)


def pairs(old: str, new: str) -> list[Pair]:
    """Return the runs that both folders have."""
    before, after = ({run.path.relative_to(root): run for run in complete_runs(read_runs(root))} for root in (old, new))
    return [(before[path], after[path]) for path in before if path in after]


def row(found: Sequence[Pair]) -> list[str]:
    """Return the number of runs, both means and the differences."""
    old, new = ([run.result.accuracy for run in runs] for runs in zip(*found, strict=True))
    differences = [abs(one - other) for one, other in zip(old, new, strict=True)]
    numbers = [
        mean(old),
        mean(new),
        abs(mean(old) - mean(new)),
        mean(differences),
        max(differences),
        between_seeds(found),
    ]
    return [str(len(found)), *(f"{number:.2f}" for number in numbers)]


def between_seeds(found: Sequence[Pair]) -> float:
    """Return the mean difference of two seeds of a configuration, estimated from their deviation; NaN for one seed."""
    runs = sorted((run for _, run in found), key=lambda run: run.settings["config"])
    groups = [[run.result.accuracy for run in group] for _, group in groupby(runs, lambda run: run.settings["config"])]
    deviations = [stdev(group) for group in groups if len(group) > 1]
    return 2 * mean(deviations) / pi**0.5 if deviations else float("nan")  # E|x − y| = 2σ/√π of a normal


if __name__ == "__main__":
    main()
