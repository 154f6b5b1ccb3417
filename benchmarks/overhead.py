"""What SORO costs on a CPU beside ER in the same engine, and what the engine costs beside a loop without it.

Two networks: ResNet-18, where arithmetic dominates, and the MLP of PS-EMNIST, where it does not. In every round all
variants take their steps in turn, in one process; ratios are medians of the ratios within a round, by the clock and in
processor time, which a busy machine disturbs less.

    python benchmarks/overhead.py [--rounds 7] [--threads 1]
"""

import argparse
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter, process_time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.learner import Learner
from spcl.methods import ER, SORO, Method
from spcl.models import MLP, Backbone, Normalise, ResNet18

BATCH, CLASSES = 128, 10
PLAIN, OURS_ER, OURS_SORO = "loss.backward() in turn", "spcl, ER", "spcl, SORO"
Batch = tuple[Tensor, Tensor]
Step = Callable[[], object]
Times = dict[str, list[tuple[float, float]]]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True)


def plain_step(backbone: nn.Module, given: list[Batch]) -> Step:
    heads = [nn.Linear(backbone.feature_dim, CLASSES) for _ in given]
    optimizer = adam([parameter for module in (backbone, *heads) for parameter in module.parameters()])

    def step() -> None:
        optimizer.zero_grad()
        for head, (x, y) in zip(heads, given, strict=True):
            cross_entropy(head(backbone(x)), y).backward()
        optimizer.step()

    return step


def learner_step(backbone: nn.Module, given: list[Batch], method: Method) -> Step:
    learner = Learner(backbone, method, optimizer=adam)
    for task in range(len(given)):
        learner.add_task(str(task), classes=CLASSES)
    return lambda: learner.step({str(task): batch for task, batch in enumerate(given)})


def variants(make: Callable[[], nn.Module], shape: tuple[int, ...], tasks: int) -> dict[str, Step]:
    torch.manual_seed(0)
    images = [torch.randint(0, 256, (BATCH, *shape), dtype=torch.uint8) for _ in range(tasks)]
    given = [(x, torch.randint(CLASSES, (BATCH,))) for x in images]
    return {
        PLAIN: plain_step(make(), given),
        OURS_ER: learner_step(make(), given, ER()),
        OURS_SORO: learner_step(make(), given, SORO()),
    }


def measure(steps: Mapping[str, Step], rounds: int, repetitions: int) -> Times:
    """Seconds a step by the clock and of the processor, in every round after one that does not count."""
    found: Times = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            clock, processor = perf_counter(), process_time()
            for _ in range(repetitions):
                step()
            taken = perf_counter() - clock, process_time() - processor
            found[name].append((taken[0] / repetitions, taken[1] / repetitions))
    return {name: taken[1:] for name, taken in found.items()}


def ratios(found: Times, one: str, other: str) -> list[float]:
    pairs = list(zip(found[one], found[other], strict=True))
    return [median(a[kind] / b[kind] for a, b in pairs) for kind in (0, 1)]


def add_rows(table: Table, title: str, found: Times, targets: Mapping[tuple[str, str], float]) -> None:
    for one, other in ((OURS_ER, PLAIN), (OURS_SORO, PLAIN), (OURS_SORO, OURS_ER)):
        clock, processor = ratios(found, one, other)
        target = targets.get((one, other))
        times = [f"{1e3 * median(seconds for seconds, _ in found[name]):.1f} ms" for name in (one, other)]
        judged = ("", "") if target is None else (f"at most {target}×", "yes" if clock <= target else "no")
        table.add_row(f"{title}: {one} against {other}", *times, f"{clock:.2f}×", f"{processor:.2f}×", *judged)
    table.add_section()


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of SORO and of the engine on a CPU.")
    parser.add_argument("--rounds", type=int, default=7, help="rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="processor threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table(title=f"Steps of {BATCH} images a task, {arguments.threads} CPU thread(s)", title_justify="left")
    for heading in ("measured", "", "against", "ratio", "ratio (processor)", "target", "met"):
        table.add_column(heading, justify="left" if heading == "measured" else "right")
    resnet = variants(lambda: Backbone(Normalise([0.5] * 3, [0.25] * 3), ResNet18()), (3, 32, 32), tasks=4)
    found = measure(resnet, arguments.rounds, repetitions=1)
    add_rows(table, "ResNet-18, T = 4", found, {(OURS_SORO, OURS_ER): 1.05})
    mlp = variants(lambda: Backbone(Normalise([0.5], [0.25]), MLP(784)), (1, 28, 28), tasks=3)
    add_rows(table, "MLP 784–128–64, T = 3", measure(mlp, arguments.rounds, repetitions=100), {})
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
