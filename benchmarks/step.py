"""A training step of ResNet-18 on four tasks: the learner against plain training and against TorchJD.

Every variant trains the same network on the same four batches with Adam. In every round all variants take one step
each, in one process; the ratios are medians of the ratios within a round, by the clock and in processor time, which a
busy machine disturbs less. Peak memory is how far the resident set grows beyond what it was before the first of two
steps, each variant in a fresh process that already holds network, batches and loaded libraries.

    python benchmarks/step.py [--rounds 7] [--threads 1]
"""

import argparse
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchjd.autojac import jac_to_grad, mtl_backward

import spcl.aggregation
from spcl.learner import Learner
from spcl.methods import ER, SORO, Method
from spcl.models import ResNet18, SmallCNN

TASKS, BATCH, CLASSES = 4, 32, 10
Batch = tuple[Tensor, Tensor]
Step = Callable[[Sequence[Batch]], object]


def batches(size: int) -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(size, 3, 32, 32), torch.randint(CLASSES, (size,))) for _ in range(TASKS)]


# -- the variants: a step for a network


def heads_and_adam(backbone: nn.Module) -> tuple[list[nn.Linear], torch.optim.Optimizer]:
    heads = [nn.Linear(backbone.feature_dim, CLASSES) for _ in range(TASKS)]
    return heads, torch.optim.Adam([parameter for module in (backbone, *heads) for parameter in module.parameters()])


def summed_losses(backbone: nn.Module) -> Step:
    heads, optimizer = heads_and_adam(backbone)

    def step(given: Sequence[Batch]) -> None:
        optimizer.zero_grad()
        losses = [cross_entropy(head(backbone(x)), y) for head, (x, y) in zip(heads, given, strict=True)]
        sum(losses).backward()
        optimizer.step()

    return step


def accumulated_losses(backbone: nn.Module) -> Step:
    heads, optimizer = heads_and_adam(backbone)

    def step(given: Sequence[Batch]) -> None:
        optimizer.zero_grad()
        for head, (x, y) in zip(heads, given, strict=True):
            cross_entropy(head(backbone(x)), y).backward()
        optimizer.step()

    return step


def learner(backbone: nn.Module, method: type[Method]) -> Step:
    trained = Learner(backbone, method(), optimizer=torch.optim.Adam)
    for task in range(TASKS):
        trained.add_task(str(task), classes=CLASSES)
    return lambda given: trained.step({str(task): pair for task, pair in enumerate(given)})


def torchjd(backbone: nn.Module, chunk: int | None) -> Step:
    heads, optimizer = heads_and_adam(backbone)
    aggregator = spcl.aggregation.SORO()

    def step(given: Sequence[Batch]) -> None:
        optimizer.zero_grad()
        features = [backbone(x) for x, _ in given]
        losses = [cross_entropy(head(f), y) for head, f, (_, y) in zip(heads, features, given, strict=True)]
        mtl_backward(losses, features, parallel_chunk_size=chunk)
        jac_to_grad(backbone.parameters(), aggregator, optimize_gramian_computation=True)
        optimizer.step()

    return step


PLAIN = "sum(losses).backward()"
VARIANTS: dict[str, Callable[[nn.Module], Step]] = {
    PLAIN: summed_losses,
    "loss.backward() in turn": accumulated_losses,
    "spcl, ER": partial(learner, method=ER),
    "spcl, SORO": partial(learner, method=SORO),
    "TorchJD, SORO, in turn": partial(torchjd, chunk=1),
    "TorchJD, SORO, vmap": partial(torchjd, chunk=None),
}


# -- the measurements


def times(step: Step, given: Sequence[Batch]) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    clock, processor = perf_counter(), process_time()
    step(given)
    return perf_counter() - clock, process_time() - processor


def measure_times(rounds: int) -> dict[str, list[tuple[float, float]]]:
    given = batches(BATCH)
    steps = {name: make(ResNet18()) for name, make in VARIANTS.items()}
    for step in steps.values():
        step(given)
    taken = [{name: times(step, given) for name, step in steps.items()} for _ in range(rounds)]
    return {name: [one[name] for one in taken] for name in VARIANTS}


def median_ratio(taken: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]], kind: int) -> float:
    return median(one[kind] / other[kind] for one, other in zip(taken, plain, strict=True))


def peak_mebibytes(name: str, threads: int) -> float:
    torch.set_num_threads(threads)
    VARIANTS[name](SmallCNN())(batches(2))
    step, given = VARIANTS[name](ResNet18()), batches(BATCH)
    before = high_water_mark(reset=True)
    for _ in range(2):
        step(given)
    return (high_water_mark() - before) / 2**20


def high_water_mark(reset: bool = False) -> int:
    """Bytes that were resident at most; where that can be, since the last reset."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure_peak(name: str) -> float:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
        return fresh_process.submit(peak_mebibytes, name, torch.get_num_threads()).result()


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a training step.")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each variant")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="processor threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = measure_times(arguments.rounds)
    row = sum(parameter.numel() for parameter in ResNet18().parameters()) * 4 / 2**20
    table = Table(
        title=f"A step of ResNet-18, {TASKS} tasks × {BATCH} images of 32×32, {arguments.threads} CPU thread(s)",
        caption=f"a gradient of the backbone has {row:.0f} MiB; Adam's state, {2 * row:.0f} MiB, is part of every peak",
    )
    for heading in ("", "time", "ratio", "ratio (processor)", "peak memory"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, taken in found.items():
        ratios = [f"{median_ratio(taken, found[PLAIN], kind):.2f}×" for kind in (0, 1)]
        clock = median(seconds for seconds, _ in taken)
        table.add_row(name, f"{clock:.2f} s", *ratios, f"{measure_peak(name):.0f} MiB")
    Console().print(table)


if __name__ == "__main__":
    main()
