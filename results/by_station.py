"""Final R² by station beside persistence: python results/by_station.py FOLDER… [--data DIR]

The folders hold unpacked records of runs of ps-air. R², in per cent, is of the last fifth of the clock, which no
station is trained on. Persistence forecasts the last value for the same hours.
"""

import argparse
from pathlib import Path
from statistics import mean

from spcl.data import SourceSamples, load_beijing_air
from spcl.results.records import complete_runs, read_runs
from spcl.runs.run import r_squared


def main() -> None:
    """Print a Markdown table: a row for every station, a column for persistence and for every method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, help="the publisher's files; by default what 'spcl data get' has fetched")
    given = parser.parse_args()
    sources = load_beijing_air(data_dir=given.data).sources
    columns = {"persistence": [[_persistence(source) for source in sources]]}
    for run in complete_runs(read_runs(*given.folders)):
        columns.setdefault(run.label, []).append([run.result.tasks[source.name].final for source in sources])
    means = {name: [mean(station) for station in zip(*runs, strict=True)] for name, runs in columns.items()}
    rows = [[source.name for source in sources], *means.values()]
    print(f"| station | {' | '.join(means)} |\n|:--|{'--:|' * len(means)}")
    for station, *scores in [*zip(*rows, strict=True), ("mean", *map(mean, means.values()))]:
        print(f"| {station} | {' | '.join(f'{score:.1f}' for score in scores)} |")


def _persistence(source: SourceSamples) -> float:
    return 100 * r_squared(source.test_x[:, -1, :1] / source.scale, source.test_y)


if __name__ == "__main__":
    main()
