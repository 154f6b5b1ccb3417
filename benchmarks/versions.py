"""This version against an earlier one: processor time of steps, a run and a checkpoint, in one go.

Each version runs in a process of its own, on one thread. They take turns, every other round in the opposite order; a
ratio is the median over the rounds of the ratios within a round, and beside it stands the range of the middle half.
What both do is named in `ROWS` and uses public names alone, so that both versions understand it.

    python benchmarks/versions.py REVISION [--rounds 15] [--rows MLP …]
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import process_time

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve()
LIMIT = 1.03
SECONDS = 0.25
"""How long the work of one turn takes, about."""

Work = Callable[[], object]


# -- what both versions do; imported by the processes of the versions alone


def step_of(network: str, sources: int, method: str, **options: object) -> Work:
    """Return a step of a learner on one batch per source; together they have as many samples as in `sources.py`."""
    import torch

    from sources import CLASSES, NETWORKS
    from spcl.learner import Learner
    from spcl.methods import make_method

    given, size = NETWORKS[network], NETWORKS[network].samples // sources
    learner = Learner(given.make(), make_method(method), optimizer=torch.optim.Adam, **options)  # type: ignore[arg-type]
    batches = {}
    for source in map(str, range(sources)):
        learner.add_task(source, classes=CLASSES)
        batches[source] = given.inputs(size), torch.randint(CLASSES, (size,))
    return lambda: learner.step(batches)


def step_with_memory(method: str, **options: object) -> Work:
    """Return a step of three tasks that replays what memory has of them and of one that is finished."""
    import torch

    from spcl.learner import Learner
    from spcl.memory import BalancedCoreset
    from spcl.methods import make_method
    from spcl.models import MLP

    learner = Learner(MLP(784), make_method(method), memory=BalancedCoreset(500), **options)  # type: ignore[arg-type]
    for task in "abcd":
        learner.add_task(task, classes=5)
    batches = {task: (torch.randn(64, 784), torch.randint(5, (64,))) for task in "abcd"}
    for _ in range(3):
        learner.step(batches)
    learner.finish_task("d")
    del batches["d"]
    return lambda: learner.step(batches)


def solve() -> Work:
    import torch

    from spcl.aggregation import SORO

    aggregate, gradients = SORO(), torch.randn(16, 100_000)
    return lambda: aggregate(gradients)


def checkpoint() -> Work:
    import torch

    from spcl.learner import Learner
    from spcl.memory import Reservoir
    from spcl.methods import SORO
    from spcl.models import MLP

    folder = tempfile.TemporaryDirectory()
    learner = Learner(MLP(784), SORO(), memory=Reservoir(500))
    learner.add_task("a", classes=5)
    learner.step({"a": (torch.randn(64, 784), torch.randint(5, (64,)))})

    def work(folder: object = folder) -> None:
        path = Path(str(getattr(folder, "name", ""))) / "c.safetensors"
        learner.save(path)
        Learner.load(path, backbone=MLP(784))

    return work


def run() -> Work:
    from spcl.runs import execute, resolve_settings

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            settings = resolve_settings({"benchmark": "ps-glyphs", "method": "spcl", "threads": 1})
            execute(settings, Path(folder) / "run")

    return work


ROWS: dict[str, Callable[[], Work]] = {
    **{
        f"MLP, {sources} × {512 // sources}, {method}": partial(step_of, "MLP", sources, method.lower())
        for sources in (4, 16, 64)
        for method in ("SORO", "ER")
    },
    "small CNN, 16 × 4, SORO": partial(step_of, "CNN", 16, "soro"),
    "transformer, 16 × 8, SORO": partial(step_of, "transformer", 16, "soro"),
    "ResNet-18, 4 × 2, SORO": partial(step_of, "ResNet-18", 4, "soro"),
    "ResNet-18, 4 × 2, SORO+DBT": partial(step_of, "ResNet-18", 4, "soro-dbt"),
    "MLP, 16 × 32, SORO, class-incremental": partial(step_of, "MLP", 16, "soro", scenario="class"),
    "MLP, 16 × 32, SORO, low memory": partial(step_of, "MLP", 16, "soro", low_memory=True),
    **{f"MLP with memory, {method}": partial(step_with_memory, method) for method in ("soro", "spcl", "er", "derpp")},
    "MLP with memory, spcl, class-incremental": partial(step_with_memory, "spcl", scenario="class"),
    "SORO of 16 gradients of 100,000 numbers": solve,
    "checkpoint saved and loaded": checkpoint,
    "run of PS-Glyphs": run,
}


def work_for_orders() -> None:
    """Make what an order names, do it as often as it says, and answer with the seconds; until there are no orders."""
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed otherwise is no answer
    works: dict[str, Work] = {}
    for order in sys.stdin:
        row, times = json.loads(order)
        if row not in works:
            torch.manual_seed(0)
            works.clear()
            works[row] = ROWS[row]()
            works[row]()
        begin = process_time()
        for _ in range(times):
            works[row]()
        print(process_time() - begin, file=answers, flush=True)


# -- the comparison


class Version:
    """A process that works with the sources in a folder."""

    def __init__(self, source: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE), "--work"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def seconds(self, row: str, times: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([row, times]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            assert self._process.stderr is not None
            raise SystemExit(f"{row}: {self._process.stderr.read()}")
        return float(answer)


def compare(row: str, before: Version, now: Version, rounds: int) -> tuple[float, list[float]]:
    """Return the seconds of the earlier version and the ratios of the rounds."""
    times = max(1, round(SECONDS / max(before.seconds(row, 1), 1e-4)))
    now.seconds(row, times)
    before.seconds(row, times)
    taken = []
    for turn in range(rounds):
        order = (before, now) if turn % 2 else (now, before)
        found = {version: version.seconds(row, times) / times for version in order}
        taken.append((found[before], found[now]))
    return median(first for first, _ in taken), [second / first for first, second in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="of the earlier version, as git names it")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each version in every row")
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of the names of rows")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work_for_orders()
    if arguments.revision is None:
        parser.error("name the revision to compare with, e.g. HEAD~1")
    root = HERE.parents[1]
    archive = subprocess.run(
        ["git", "-C", root, "archive", arguments.revision, "src"], check=True, capture_output=True
    ).stdout
    rows = [row for row in ROWS if any(part in row for part in arguments.rows)]
    table = Table(title=f"Processor time of this version over that of {arguments.revision}, one thread", min_width=80)
    for column in ("", "before", "now / before", "middle half"):
        table.add_column(column, justify="left" if not column else "right")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
            sources.extractall(folder, filter="data")
        before, now = Version(Path(folder) / "src"), Version(root / "src")
        for row in track(rows, console=Console(stderr=True), description="comparing"):
            first, ratios = compare(row, before, now, arguments.rounds)
            low, _, high = quantiles(ratios, n=4)
            mark = " !" if median(ratios) > LIMIT else ""
            table.add_row(row, f"{first * 1e3:.2f} ms", f"{median(ratios):.3f}×{mark}", f"{low:.3f} to {high:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
