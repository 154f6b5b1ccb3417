"""What several ranks send and how long their steps take: bytes measured on the loopback device, against the formula.

Every rank has one thread, and all are on this machine. ResNet-18 is trained with SORO on T tasks.
Bytes are counted by the kernel on ``lo``, headers included. With gloo all traffic goes there; so do the bytes of other
programs. The formula is (R−1)/R · (T/P + 1) · n numbers of 4 bytes for each of R ranks in P task groups.

    python benchmarks/distributed.py [--rounds 3] [--steps 5] [--tasks 4] [--batch 16]
"""

import argparse
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.multiprocessing
from rich.console import Console
from rich.table import Table

from spcl.distributed import World, join_world, leave_world
from spcl.learner import Learner
from spcl.methods import SORO
from spcl.models import ResNet18

SPLITS = ("1x1", "2x1", "1x2", "2x2")
TARGET = 1.1


def sent_bytes() -> int:
    """The bytes that this machine has sent to itself so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


@contextmanager
def measured(world: World | None, into: dict[str, Any]) -> Iterator[None]:
    if world is not None:
        world.any(False)  # all ranks begin together
    begin, before = perf_counter(), sent_bytes()
    yield
    into["seconds"], into["bytes"] = perf_counter() - begin, sent_bytes() - before


def train(world: World | None, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the bytes sent and the seconds taken by a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    backbone = ResNet18()
    learner = Learner(backbone, SORO(), distributed=world)
    names = [f"task {index}" for index in range(options.tasks)]
    for name in names:
        learner.add_task(name, classes=5)
    x, y = torch.randn(options.batch, 3, 32, 32), torch.arange(options.batch) % 5
    found: dict[str, Any] = {"numbers": sum(parameter.numel() for parameter in backbone.parameters())}
    times, sizes = [], []
    for step in range(options.steps + 2):
        with measured(world, found):
            learner.step(dict.fromkeys(names, (x, y)))
            if world is not None:
                world.any(False)
        if step >= 2:
            times.append(found["seconds"])
            sizes.append(found["bytes"])
    return found | {"seconds": median(times), "bytes": median(sizes)}


def shape(split: str) -> tuple[int, int]:
    """The number of task groups and of all ranks."""
    groups, shares = map(int, split.split("x"))
    return groups, groups * shares


def rank(index: int, split: str, port: int, options: argparse.Namespace, answers: Any) -> None:
    _, size = shape(split)
    os.environ |= {"RANK": str(index), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = train(join_world(split), options)
    if index == 0:
        answers.put(found)
    leave_world()


def on_ranks(split: str, options: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    _, size = shape(split)
    torch.multiprocessing.spawn(rank, (split, port, options, answers), nprocs=size)  # type: ignore[no-untyped-call]
    found: dict[str, Any] = answers.get()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes and step times of several ranks.")
    for name, default in {"rounds": 3, "steps": 5, "tasks": 4, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rounds = [{split: on_ranks(split, options) for split in SPLITS} for _ in range(options.rounds)]
    found = {split: {key: median(each[split][key] for each in rounds) for key in rounds[0][split]} for split in SPLITS}
    table = Table(title=f"{options.tasks} gradients of {found['1x1']['numbers']:,} numbers, gloo, 1 thread per rank")
    for heading in ("split", "step", "speed-up", "sent per rank", "formula", "ratio", "target", "met"):
        table.add_column(heading, justify="right")
    for split, values in found.items():
        groups, size = shape(split)
        formula = (size - 1) / size * (options.tasks / groups + 1) * 4 * values["numbers"]
        sent = values["bytes"] / size
        speed = f"{median(each['1x1']['seconds'] / each[split]['seconds'] for each in rounds):.2f}×"
        row = [split, f"{1e3 * values['seconds']:.0f} ms", speed]
        if formula:
            row += [f"{sent / 2**20:.2f} MiB", f"{formula / 2**20:.2f} MiB", f"{sent / formula:.3f}"]
            row += [f"at most {TARGET}", "yes" if sent <= TARGET * formula else "no"]
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
