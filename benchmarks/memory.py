"""Peak memory of a step of many tasks: plain training on the joint batch, all gradients held, and low-memory mode.

Every variant runs in a process of its own. On a GPU the peak is that of PyTorch's allocator, for ResNet-18 in bfloat16;
on a CPU it is how much the process has grown, for a smaller network without batch-norm.

    python benchmarks/memory.py [--device cuda] [--tasks 32] [--batch 16] [--steps 10]
"""

import argparse
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.learner import Learner
from spcl.methods import SORO
from spcl.models import ResNet18

CLASSES, TARGET = 10, 1.3
Batch = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """What is stepped."""

    device: str
    tasks: int
    batch: int
    steps: int


class Measurement(NamedTuple):
    """Peak memory in bytes, in use and reserved, and seconds of a step."""

    used: float
    reserved: float
    seconds: float


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    net = ResNet18() if device == "cuda" else small_network()
    return net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def small_network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 256), (256, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 512))


def batches(case: Case) -> list[Batch]:
    torch.manual_seed(1)
    images = [torch.randn(case.batch, 3, 32, 32, device=case.device) for _ in range(case.tasks)]
    return [(x, torch.arange(case.batch) % CLASSES) for x in images]


def autocast_dtype(case: Case) -> torch.dtype | None:
    return torch.bfloat16 if case.device == "cuda" else None


def plain_step(case: Case) -> Callable[[], object]:
    """Forward, backward and Adam on the joint batch, with a head per task."""
    net = network(case.device)
    heads = nn.ModuleList(nn.Linear(512, CLASSES) for _ in range(case.tasks)).to(case.device)
    optimizer = torch.optim.Adam([*net.parameters(), *heads.parameters()])
    pairs = batches(case)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(case.device, torch.bfloat16, enabled=case.device == "cuda"):
            features = net(torch.cat([x for x, _ in pairs])).split(case.batch)
            logits = [head(part) for head, part in zip(heads, features, strict=True)]
        losses = [cross_entropy(z.float(), y.to(z.device)) for z, (_, y) in zip(logits, pairs, strict=True)]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def learner_step(case: Case, low_memory: bool) -> Callable[[], object]:
    learner = Learner(network(case.device), SORO(), autocast=autocast_dtype(case), low_memory=low_memory)
    given = {str(task): batch for task, batch in enumerate(batches(case))}
    for task in given:
        learner.add_task(task, classes=CLASSES)
    return partial(learner.step, given)


VARIANTS: dict[str, Callable[[Case], Callable[[], object]]] = {
    "plain training on the joint batch": plain_step,
    "SORO, gradients held": partial(learner_step, low_memory=False),
    "SORO, low memory": partial(learner_step, low_memory=True),
}


def measure(variant: str, case: Case) -> Measurement:
    torch.set_num_threads(1)
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = VARIANTS[variant](case)
    taken = []
    for _ in range(case.steps):
        started = perf_counter()
        step()
        if case.device == "cuda":
            torch.cuda.synchronize()
        taken.append(perf_counter() - started)
    if case.device == "cuda":
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        peaks = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - begin,) * 2
    return Measurement(*peaks, median(taken[case.steps // 2 :]))


def measured(variant: str, case: Case) -> Measurement:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
        return fresh_process.submit(measure, variant, case).result()


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of a step of many tasks.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16, help="samples of a task")
    parser.add_argument("--steps", type=int, default=10)
    case = Case(**vars(parser.parse_args()))
    name = "ResNet-18, bfloat16" if case.device == "cuda" else "small convolutional network"
    net = ResNet18() if case.device == "cuda" else small_network()
    length = sum(parameter.numel() for parameter in net.parameters())
    title = f"{name}, {length / 1e6:.1f} million parameters, {case.tasks} tasks × {case.batch} images, {case.device}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "peak", "ratio", "reserved", "ratio", "a step", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    found = {variant: measured(variant, case) for variant in VARIANTS}
    plain = next(iter(found.values()))
    for variant, each in found.items():
        cells = [f"{each.used / 2**20:,.0f} MiB", f"{each.used / plain.used:.2f}×"]
        cells += [f"{each.reserved / 2**20:,.0f} MiB", f"{each.reserved / plain.reserved:.2f}×"]
        table.add_row(variant, *cells, f"{1e3 * each.seconds:.1f} ms", f"{each.seconds / plain.seconds:.2f}×")
    console = Console(width=120)
    console.print(table)
    low = found["SORO, low memory"].used / plain.used
    console.print(f"low memory, at most {TARGET}× plain training: {'yes' if low <= TARGET else 'no'} ({low:.2f}×)")


if __name__ == "__main__":
    main()
