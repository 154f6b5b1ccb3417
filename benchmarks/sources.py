"""A training step at a fixed number of samples, from one source to many: the learner against plain training.

Plain training is one pass over the joint batch with the same heads, the sum of their losses, and Adam, which on a CPU
updates one tensor after the other by default; beside it stands the same with Adam's fused update, which the learner
uses. The learner takes the same step, with one pass over all sources and, for comparison, with one pass per source. In
every round all variants take some steps each, one after the other as in training, in one process; a ratio is the median
of the ratios within a round. Where a process has its memory makes a difference of some per cent, so that rounds are
made by several processes. "One head" is the learner with sources that share one task. Times are processor time, which a
busy machine disturbs less than that of the clock.

    python benchmarks/sources.py [--networks MLP transformer] [--processes 5] [--threads 1] [--figure FILE]
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.learner import Learner
from spcl.methods import ER, SORO, Method
from spcl.models import MLP, ResNet18, SmallCNN, TextTransformer

CLASSES = 5
Batch = tuple[Tensor, Tensor]
Step = Callable[[Sequence[Batch]], object]


@dataclass(frozen=True)
class Network:
    """A backbone, its inputs, how many samples a step has, and how many rounds of how many steps a process measures."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    samples: int
    rounds: int
    steps: int


NETWORKS = {
    "MLP": Network(lambda: MLP(784), lambda count: torch.randn(count, 784), 512, 12, 10),
    "CNN": Network(SmallCNN, lambda count: torch.randn(count, 3, 32, 32), 64, 2, 3),
    "transformer": Network(
        lambda: TextTransformer(1000, 16), lambda count: torch.randint(1, 1000, (count, 16)), 128, 2, 5
    ),
    "ResNet-18": Network(ResNet18, lambda count: torch.randn(count, 3, 32, 32), 8, 1, 2),
}


# -- the variants: a step for a network and a number of sources


def joint(backbone: nn.Module, sources: int, fused: bool | None = None) -> Step:
    heads = [nn.Linear(backbone.feature_dim, CLASSES) for _ in range(sources)]
    parameters = [parameter for module in (backbone, *heads) for parameter in module.parameters()]
    optimizer = torch.optim.Adam(parameters, fused=fused)

    def step(given: Sequence[Batch]) -> None:
        optimizer.zero_grad()
        features = backbone(torch.cat([x for x, _ in given])).split([len(x) for x, _ in given])
        losses = [cross_entropy(head(f), y) for head, f, (_, y) in zip(heads, features, given, strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()

    return step


def learner(backbone: nn.Module, sources: int, method: Method, one_pass: bool = True, one_head: bool = False) -> Step:
    trained = Learner(backbone, method, optimizer=torch.optim.Adam)
    if not one_pass:
        trained._engine.one_pass = None
    if one_head:
        trained.add_task("shared", classes=CLASSES)
    for source in range(sources):
        if one_head:
            trained.add_source(str(source), task="shared")
        else:
            trained.add_task(str(source), classes=CLASSES)
    return lambda given: trained.step({str(source): pair for source, pair in enumerate(given)})


VARIANTS: dict[str, Callable[[nn.Module, int], Step]] = {
    "joint": joint,
    "joint, fused Adam": partial(joint, fused=True),
    "SORO": lambda backbone, sources: learner(backbone, sources, SORO()),
    "SORO, one head": lambda backbone, sources: learner(backbone, sources, SORO(), one_head=True),
    "SORO, a pass each": lambda backbone, sources: learner(backbone, sources, SORO(), one_pass=False),
    "ER": lambda backbone, sources: learner(backbone, sources, ER()),
    "ER, one head": lambda backbone, sources: learner(backbone, sources, ER(), one_head=True),
    "ER, a pass each": lambda backbone, sources: learner(backbone, sources, ER(), one_pass=False),
}

LINES = {
    "joint": {"color": "0.3"},
    "joint, fused Adam": {"color": "0.3", "linestyle": ":"},
    "SORO": {"color": "tab:blue", "marker": "o"},
    "SORO, one head": {"color": "tab:blue", "linestyle": ":"},
    "SORO, a pass each": {"color": "tab:blue", "linestyle": "--"},
    "ER": {"color": "tab:orange", "marker": "o"},
    "ER, one head": {"color": "tab:orange", "linestyle": ":"},
    "ER, a pass each": {"color": "tab:orange", "linestyle": "--"},
}
"""How the figure draws them."""


# -- the measurements


def seconds(step: Step, given: Sequence[Batch], steps: int) -> float:
    begin = process_time()
    for _ in range(steps):
        step(given)
    return (process_time() - begin) / steps


def measure(name: str, sources: int, threads: int) -> dict[str, list[float]]:
    """Return the seconds of a step of every variant, by round."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    network = NETWORKS[name]
    size = network.samples // sources
    given = [(network.inputs(size), torch.randint(CLASSES, (size,))) for _ in range(sources)]
    steps = {name: make(network.make(), sources) for name, make in VARIANTS.items()}
    for step in steps.values():
        step(given)
    taken = [
        {variant: seconds(step, given, network.steps) for variant, step in steps.items()} for _ in range(network.rounds)
    ]
    return {variant: [one[variant] for one in taken] for variant in VARIANTS}


def measure_often(name: str, sources: int, threads: int, processes: int) -> dict[str, list[float]]:
    """Return what several processes measure, one after the other."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        found = list(pool.map(measure, *zip(*[(name, sources, threads)] * processes, strict=True)))
    return {variant: [each for one in found for each in one[variant]] for variant in VARIANTS}


def ratio(found: Mapping[str, Sequence[float]], name: str) -> float:
    return median(one / other for one, other in zip(found[name], found["joint"], strict=True))


def print_table(name: str, network: Network, found: Mapping[int, Mapping[str, Sequence[float]]], threads: int) -> None:
    table = Table(
        title=f"{name}: a step of {network.samples} samples, {threads} CPU thread(s)",
        caption="times plain training on the joint batch with the same heads",
    )
    for heading in ("sources × samples", "joint batch", *list(VARIANTS)[1:]):
        table.add_column(heading, justify="right")
    for sources, times in found.items():
        ratios = [f"{ratio(times, variant):.2f}×" for variant in list(VARIANTS)[1:]]
        milliseconds = f"{1e3 * median(times['joint']):.1f} ms"
        table.add_row(f"{sources} × {network.samples // sources}", milliseconds, *ratios)
    Console().print(table)


def write_figure(path: Path, found: Mapping[str, Mapping[int, Mapping[str, Sequence[float]]]]) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    times = [0.5, 1, 2, 4, 8, 16]
    figure, axes = plt.subplots(1, len(found), figsize=(3.4 * len(found), 3.4), sharey=True, layout="constrained")
    for axis, (name, by_sources) in zip(np.atleast_1d(axes), found.items(), strict=True):
        for variant in next(iter(by_sources.values())):
            ratios = [ratio(taken, variant) for taken in by_sources.values()]
            axis.plot(list(by_sources), ratios, label=variant, **LINES[variant])
        axis.set(title=name, xscale="log", yscale="log", xlabel="sources")
        axis.set_xticks(list(by_sources), labels=map(str, by_sources))
        axis.set_yticks(times, labels=[f"{number:g}×" for number in times])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
    figure.supylabel("time of a step over the joint batch's", fontsize="medium")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(LINES), frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a training step over the number of sources.")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="networks to measure")
    parser.add_argument("--sources", nargs="+", type=int, default=[2**n for n in range(7)], help="numbers of sources")
    parser.add_argument("--processes", type=int, default=5, help="processes that measure, one after the other")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    parser.add_argument("--figure", type=Path, help="file for a figure, e.g. sources.png")
    arguments = parser.parse_args()
    found: dict[str, dict[int, dict[str, list[float]]]] = {}
    for name in arguments.networks:
        network = NETWORKS[name]
        counts = [sources for sources in arguments.sources if sources <= network.samples]
        options = arguments.threads, arguments.processes
        found[name] = {sources: measure_often(name, sources, *options) for sources in counts}
        print_table(name, network, found[name], arguments.threads)
    if arguments.figure is not None:
        write_figure(arguments.figure, found)


if __name__ == "__main__":
    main()
