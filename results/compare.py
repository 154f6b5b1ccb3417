"""How far runs differ that were made again: python results/compare.py OLD_FOLDER NEW_FOLDER

Both hold unpacked records of the same settings, configurations and seeds, made by another machine or version. Where
nothing but rounding differs, this is what a difference between methods has to exceed; beside it stands how far two
seeds are apart.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from math import isnan, nan
from statistics import mean

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
        for label in (new.label, "(all methods)"):
            rows[f"{new.scenario} {label}"].append((old, new))
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
    means = mean(old), mean(new)
    numbers = [*means, abs(means[0] - means[1]), mean(differences), max(differences), between_seeds(found)]
    return [str(len(found)), *("–" if isnan(number) else f"{number:.2f}" for number in numbers)]


def between_seeds(found: Sequence[Pair]) -> float:
    """Return the mean difference of two seeds of a configuration; NaN if there is one seed."""
    by_seed = defaultdict(list)
    for _, run in found:
        by_seed[run.label, run.settings["config"]].append(run.result.accuracy)
    differences = [abs(one - other) for seeds in by_seed.values() for one, other in combinations(seeds, 2)]
    return mean(differences) if differences else nan


if __name__ == "__main__":
    main()
