"""Online errors by station beside persistence: python results/by_station.py FOLDER… [--data DIR]

The folders hold unpacked records of runs of ps-air. A batch is forecast before it is trained on; errors are mean
absolute errors in µg/m³ over the hours of training, those of the first steps included. Persistence forecasts the last
value for the same hours.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from spcl.data import load_beijing_air
from spcl.results.records import complete_runs, read_runs


def main() -> None:
    """Print a row for persistence and for every variant of a method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, help="the publisher's files; by default what 'spcl data get' has fetched")
    given = parser.parse_args()
    sources = load_beijing_air(data_dir=given.data).sources
    rows = defaultdict(list)
    for run in complete_runs(read_runs(*given.folders)):
        rows[run.label].append([sources[0].scale * run.result.prequential[source.name] for source in sources])
    table = Table(
        "method", "runs", "mean", *(source.name for source in sources), title="Online error by station, µg/m³"
    )
    last = [
        source.scale * float((source.train_x[:, -1, :1] / source.scale - source.train_y).abs().mean())
        for source in sources
    ]
    for name, runs in [("persistence", [last]), *rows.items()]:
        by_station = [mean(station) for station in zip(*runs, strict=True)]
        count = "" if name == "persistence" else str(len(runs))
        table.add_row(name, count, *(f"{error:.1f}" for error in (mean(by_station), *by_station)))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
