"""What the Ray engine costs beside the local one: the same grid of short runs, on as many processes, without start-up.

Every round makes 24 runs with either engine, into an empty folder. Their processes have made a run before, so that
starting them and importing PyTorch do not count; what counts is the time from the first order to the last result.

    python benchmarks/engines.py [--rounds 3] [--jobs 2]
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from spcl.grids import Job, Pool, RayPool, SilentGridView, WorkerPool, plan_grid, run_jobs

TARGET = 1.1
SETTINGS = {"benchmark": "ps-glyphs", "threads": 1, "device": "cpu"}


def plan(out: Path, configs: int) -> list[Job]:
    return plan_grid(
        out, SETTINGS, methods=["er", "soro"], scenarios=["task", "class"], configs=range(configs), seeds=[0]
    )


def seconds(pool: Pool, configs: int) -> float:
    """The time of 4 × ``configs`` runs."""
    with tempfile.TemporaryDirectory() as folder:
        begin = perf_counter()
        state = run_jobs(plan(Path(folder), configs), pool, SilentGridView())
        assert not state.failed
        return perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="The Ray engine against the local one.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {"local": [], "ray": []}
    with WorkerPool(arguments.jobs) as local, RayPool(size=arguments.jobs) as ray:
        pools: dict[str, Pool] = {"local": local, "ray": ray}
        for pool in pools.values():
            seconds(pool, configs=1)
        for _ in range(arguments.rounds):
            for name, pool in pools.items():
                taken[name].append(seconds(pool, configs=6))
    ratio = median(one / other for one, other in zip(taken["ray"], taken["local"], strict=True))
    table = Table(title=f"24 runs on PS-Glyphs, {arguments.jobs} at once, {arguments.rounds} rounds")
    for heading in ("local", "ray", "ratio", "target", "met"):
        table.add_column(heading, justify="right")
    times = [f"{median(taken[name]):.1f} s" for name in ("local", "ray")]
    table.add_row(*times, f"{ratio:.2f}×", f"at most {TARGET}×", "yes" if ratio <= TARGET else "no")
    Console().print(table)


if __name__ == "__main__":
    main()
