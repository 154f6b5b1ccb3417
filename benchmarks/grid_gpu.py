"""How many runs of a grid to do at once on one GPU: runs a minute for several ``--jobs``.

The same small PS-CIFAR-100 grid is run once for every number of jobs, each time into an empty folder. What counts is
the rate while all processes are at work: after everyone's first run, which is slow, and until one of them has nothing
more to do. A large grid goes on at that rate. Many processes on one GPU gain most where CUDA's multi-process service
shares it among them (`nvidia-cuda-mps-control -d`).

    python benchmarks/grid_gpu.py --data-dir DIR [--protocol ps-cifar100.json] [--jobs 1,4,8]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from time import time

import torch
from rich.live import Live
from rich.table import Table

METHODS, SCENARIOS = ("er", "a-gem", "mgda", "soro"), ("task", "class")


def finishing_times(jobs: int, arguments: argparse.Namespace) -> list[float]:
    """When every run of the grid was complete, in seconds after its start, in order."""
    options = {
        "--benchmark": "ps-cifar100",
        "--preset": "paper",
        "--methods": ",".join(METHODS),
        "--scenarios": ",".join(SCENARIOS),
        "--configs": f"0-{arguments.configs - 1}",
        "--seeds": "0",
        "--jobs": str(jobs),
        "--device": "cuda",
        "--set": "precision=bfloat16",
    }
    given = {"--data-dir": arguments.data_dir, "--protocol": arguments.protocol}
    options |= {name: value for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        words = [word for pair in {**options, "--out": str(Path(folder) / "grid")}.items() for word in pair]
        begin = time()
        command = [sys.executable, "-c", "from spcl.cli import main; main()", "grid", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return sorted(result.stat().st_mtime - begin for result in Path(folder).rglob("result.json"))


def rate(finished: list[float], jobs: int) -> float:
    """Runs a second between the end of everyone's first run and the start of the last ones."""
    busy = finished[jobs - 1 : len(finished) - jobs + 1]
    return (len(busy) - 1) / (busy[-1] - busy[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="The best number of jobs of a grid on one GPU.")
    parser.add_argument("--jobs", default="1,4,8,12", help="numbers of jobs")
    parser.add_argument("--configs", type=int, default=5, help="configurations, of 8 runs each")
    parser.add_argument("--data-dir", help="where the publishers' files are")
    parser.add_argument("--protocol", help="the published protocol; one is drawn if it is not given")
    arguments = parser.parse_args()
    runs = len(METHODS) * len(SCENARIOS) * arguments.configs
    numbers = [int(number) for number in arguments.jobs.split(",")]
    if runs < 3 * max(numbers):
        parser.error(f"{runs} runs are too few for {max(numbers)} jobs: each should make three; give more --configs")
    table = Table(title=f"{runs} PS-CIFAR-100 runs on one {torch.cuda.get_device_name()}")
    for heading in ("jobs", "in all", "runs a minute, all at work", "of the first"):
        table.add_column(heading, justify="right")
    rates: list[float] = []
    with Live(table, auto_refresh=False) as live:
        for jobs in numbers:
            finished = finishing_times(jobs, arguments)
            rates.append(rate(finished, jobs))
            table.add_row(str(jobs), f"{finished[-1]:.0f} s", f"{60 * rates[-1]:.0f}", f"{rates[-1] / rates[0]:.2f}×")
            live.refresh()


if __name__ == "__main__":
    main()
