"""A training step on a GPU at a fixed number of samples, from one source to many: the learner against plain training.

Plain training is one pass over the joint batch with the same heads and Adam, as one CUDA graph: the least that such a
step can take. Beside it the learner takes the same step, with one pass over all sources and, for comparison, with one
pass per source, as it did before. Rounds of all variants alternate in one process; a ratio is the median over rounds.

    python benchmarks/sources_gpu.py [--networks ResNet-18 MLP] [--rounds 5] [--figure sources_gpu.png]
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

from sources import CLASSES, NETWORKS, Batch, write_figure
from spcl.learner import Learner
from spcl.methods import ER, SORO, Method
from step_gpu import GPU, Step, adam, captured

SAMPLES = {"MLP": 512, "CNN": 512, "transformer": 512, "ResNet-18": 512}
STEPS = 10


# -- the variants: a step for a network and the batches of the sources


def joint(backbone: nn.Module, given: Sequence[Batch], autocast: bool) -> Step:
    heads = [nn.Linear(backbone.feature_dim, CLASSES, device=GPU) for _ in given]
    optimizer = adam([parameter for module in (backbone, *heads) for parameter in module.parameters()])
    x, labels = torch.cat([x for x, _ in given]), [y.to(GPU) for _, y in given]

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
            features = backbone(x).split([len(y) for y in labels])
            logits = [head(part) for head, part in zip(heads, features, strict=True)]
        losses = [cross_entropy(part.float(), y) for part, y in zip(logits, labels, strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()

    return captured(step)


def learner(backbone: nn.Module, given: Sequence[Batch], autocast: bool, method: Method, one_pass: bool) -> Step:
    trained = Learner(backbone, method, optimizer=adam, autocast=torch.bfloat16 if autocast else None)
    if not one_pass:
        trained._engine._one_pass.find = lambda batches: None
    for source in range(len(given)):
        trained.add_task(str(source), classes=CLASSES)
    batches = {str(source): batch for source, batch in enumerate(given)}
    return lambda: trained.step(batches)


VARIANTS: dict[str, Callable[[nn.Module, Sequence[Batch], bool], Step]] = {
    "joint": joint,
    "SORO": lambda *given: learner(*given, SORO(), one_pass=True),
    "SORO, a pass each": lambda *given: learner(*given, SORO(), one_pass=False),
    "ER": lambda *given: learner(*given, ER(), one_pass=True),
    "ER, a pass each": lambda *given: learner(*given, ER(), one_pass=False),
}


# -- the measurements


def measure(name: str, sources: int, rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    size, autocast = SAMPLES[name] // sources, name == "ResNet-18"
    given = [(NETWORKS[name].inputs(size).to(GPU), torch.randint(CLASSES, (size,))) for _ in range(sources)]
    steps = {variant: make(network(name), given, autocast) for variant, make in VARIANTS.items()}
    for step in steps.values():
        for _ in range(15):
            step()
    taken = [{variant: seconds(step) for variant, step in steps.items()} for _ in range(rounds)]
    return {variant: [one[variant] for one in taken] for variant in VARIANTS}


def network(name: str) -> nn.Module:
    backbone = NETWORKS[name].make().to(GPU)
    return backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def seconds(step: Step) -> float:
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (perf_counter() - begin) / STEPS


def table(name: str, found: Mapping[int, Mapping[str, Sequence[float]]]) -> Table:
    precision = "bfloat16" if name == "ResNet-18" else "float32"
    result = Table(title=f"{name}, {precision}: milliseconds of a step of {SAMPLES[name]} samples")
    for heading in ("sources × samples", "joint batch, one graph", *list(VARIANTS)[1:]):
        result.add_column(heading, justify="right")
    for sources, times in found.items():
        result.add_row(
            f"{sources} × {SAMPLES[name] // sources}",
            *(f"{1e3 * median(times[variant]):.2f}" for variant in VARIANTS),
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a training step on a GPU over the number of sources.")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="networks to measure")
    parser.add_argument("--sources", nargs="+", type=int, default=[2**n for n in range(7)], help="numbers of sources")
    parser.add_argument("--rounds", type=int, default=3, help=f"times {STEPS} steps of each variant")
    parser.add_argument("--figure", type=Path, help="file for a figure, e.g. sources_gpu.png")
    arguments = parser.parse_args()
    console, found = Console(width=120), dict[str, dict[int, dict[str, list[float]]]]()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in arguments.networks:
        found[name] = {sources: measure(name, sources, arguments.rounds) for sources in arguments.sources}
        console.print(table(name, found[name]))
    if arguments.figure is not None:
        write_figure(arguments.figure, found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
