"""How many runs of a grid to do at once on one GPU: runs a minute for several ``--jobs``.

The same small PS-CIFAR-100 grid is run once for every number of jobs, each time into an empty folder. Many processes
on one GPU gain most where CUDA's multi-process service shares it among them (`nvidia-cuda-mps-control -d`).

    python benchmarks/grid_gpu.py --data-dir DIR [--protocol ps-cifar100.json] [--jobs 1,4,8]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from rich.live import Live
from rich.table import Table

METHODS, SCENARIOS = ("er", "a-gem", "mgda", "soro"), ("task", "class")


def seconds_of(jobs: int, configurations: int, arguments: argparse.Namespace) -> float:
    options = {
        "--benchmark": "ps-cifar100",
        "--preset": "paper",
        "--methods": ",".join(METHODS),
        "--scenarios": ",".join(SCENARIOS),
        "--configs": f"0-{configurations - 1}",
        "--jobs": str(jobs),
        "--device": "cuda",
        "--set": "precision=bfloat16",
    }
    given = {"--data-dir": arguments.data_dir, "--protocol": arguments.protocol}
    options |= {name: value for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        words = [word for pair in {**options, "--out": str(Path(folder) / "grid")}.items() for word in pair]
        begin = perf_counter()
        command = [sys.executable, "-c", "from spcl.cli import main; main()", "grid", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="The best number of jobs of a grid on one GPU.")
    parser.add_argument("--jobs", default="1,4,8,12", help="numbers of jobs")
    parser.add_argument("--configs", type=int, default=2, help="configurations, of 8 runs each")
    parser.add_argument("--data-dir", help="where the publishers' files are")
    parser.add_argument("--protocol", help="the published protocol; one is drawn if it is not given")
    arguments = parser.parse_args()
    runs = len(METHODS) * len(SCENARIOS) * arguments.configs
    table = Table(title=f"{runs} PS-CIFAR-100 runs on one {torch.cuda.get_device_name()}, start of processes included")
    for heading in ("jobs", "time", "runs a minute", "of the first"):
        table.add_column(heading, justify="right")
    taken: dict[int, float] = {}
    with Live(table, auto_refresh=False) as live:
        for jobs in map(int, arguments.jobs.split(",")):
            seconds = taken[jobs] = seconds_of(jobs, arguments.configs, arguments)
            first, *_ = taken.values()
            table.add_row(str(jobs), f"{seconds:.0f} s", f"{60 * runs / seconds:.0f}", f"{first / seconds:.1f}×")
            live.refresh()


if __name__ == "__main__":
    main()
