"""Steps on a GPU: CUDA graphs, SORO against ER, training habits, a gradient three ways, and peak memory.

Compared steps are run in turns, in one process, and the ratios are medians over the rounds. Peak memory is what PyTorch
has reserved on the GPU at most, in a process of its own for every variant.

    python benchmarks/step_gpu.py [--rounds 5] [--compile]
"""

import argparse
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import ER, SORO, Method
from spcl.models import MLP, Backbone, Normalise, ResNet18
from spcl.schedules import Cosine
from spcl.transforms import Compose, Crop, Flip

GPU = torch.device("cuda")
BATCH, CLASSES = 128, 10
Batch = tuple[Tensor, Tensor]
Step = Callable[[], object]


# -- what is stepped


def resnet() -> nn.Module:
    net = Backbone(Normalise([0.5] * 3, [0.25] * 3), ResNet18())
    return net.to(GPU, memory_format=torch.channels_last)  # type: ignore[call-overload]


def mlp() -> nn.Module:
    return Backbone(Normalise([0.5], [0.25]), MLP(784)).to(GPU)


SHAPES = {resnet: (3, 32, 32), mlp: (1, 28, 28)}


def batches(make: Callable[[], nn.Module], tasks: int) -> list[Batch]:
    torch.manual_seed(1)
    shape = SHAPES[make]
    images = [torch.randint(0, 256, (BATCH, *shape), dtype=torch.uint8, device=GPU) for _ in range(tasks)]
    return [(x, torch.randint(CLASSES, (BATCH,))) for x in images]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True, capturable=True)


def learner_step(
    make: Callable[[], nn.Module],
    method: type[Method],
    tasks: int,
    *,
    capture: bool = True,
    autocast: torch.dtype | None = None,
    replays: bool = False,
    **habits: Any,
) -> Step:
    torch.manual_seed(0)
    memory = BalancedCoreset(1000, device=GPU) if replays else None
    options = {"memory_batch": BATCH, "capture": capture, "autocast": autocast}
    learner = Learner(make(), method(), optimizer=adam, memory=memory, **options, **habits)
    if replays:
        learner.add_task("earlier", classes=CLASSES)
        for _ in range(10):
            learner.step({"earlier": batches(make, 1)[0]})
        learner.finish_task("earlier")
    given = {str(task): batch for task, batch in enumerate(batches(make, tasks))}
    for task in given:
        learner.add_task(task, classes=CLASSES)
    return partial(learner.step, given)


def plain_step(make: Callable[[], nn.Module]) -> Step:
    """Forward, backward and Adam on one batch, as everyone writes it."""
    net, head = make(), nn.Linear(512, CLASSES, device=GPU)
    optimizer = adam([*net.parameters(), *head.parameters()])
    (x, y), *_ = batches(make, 1)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(head(net(x)), y.to(GPU))
        loss.backward()
        optimizer.step()

    return step


# -- what is measured


def seconds_of(steps: Mapping[str, Step], rounds: int, repetitions: int = 50) -> dict[str, list[float]]:
    """Seconds a step, of every variant in every round, after warming up."""
    for step in steps.values():
        for _ in range(10):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            torch.cuda.synchronize()
            begin = perf_counter()
            for _ in range(repetitions):
                step()
            torch.cuda.synchronize()
            found[name].append((perf_counter() - begin) / repetitions)
    return found


def ratio(found: Mapping[str, list[float]], one: str, other: str) -> float:
    return median(a / b for a, b in zip(found[one], found[other], strict=True))


def peak_mebibytes(variant: str, tasks: int) -> float:
    step = plain_step(resnet) if variant == "plain" else learner_step(resnet, SORO, tasks, autocast=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        step()
    return torch.cuda.max_memory_reserved() / 2**20


def measured_peak(variant: str, tasks: int) -> float:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
        return fresh_process.submit(peak_mebibytes, variant, tasks).result()


# -- the tables


def judged_table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("measured", "", "against", "ratio", "target", "met"):
        table.add_column(heading, justify="left" if heading == "measured" else "right")
    return table


def add_speed(table: Table, rounds: int) -> None:
    for title, steps, replays, target in (
        ("MLP 784–128–64, T = 3, SORO: captured against eager", 3, False, 5.0),
        ("the same, three tasks and memory", 3, True, None),
    ):
        make = partial(learner_step, mlp, SORO, steps, replays=replays)
        found = seconds_of({"captured": make(), "eager": make(capture=False)}, rounds)
        faster = ratio(found, "eager", "captured")
        table.add_row(
            title,
            *(f"{1e3 * median(found[name]):.2f} ms" for name in ("captured", "eager")),
            f"{faster:.1f}× faster",
            *(("", "") if target is None else (f"at least {target:.0f}×", "yes" if faster >= target else "no")),
        )
    make = partial(learner_step, resnet, tasks=4, autocast=torch.bfloat16)
    found = seconds_of({"SORO": make(method=SORO), "ER": make(method=ER)}, rounds)
    slower = ratio(found, "SORO", "ER")
    table.add_row(
        "ResNet-18, T = 4: SORO against ER, both captured",
        *(f"{1e3 * median(found[name]):.2f} ms" for name in ("SORO", "ER")),
        *(f"{slower:.2f}× the time", "at most 1.10×", "yes" if slower <= 1.10 else "no"),
    )


def add_habits(table: Table, rounds: int) -> None:
    """Training habits against the same steps without; with T = 4 and memory, five gradients a step."""
    make = partial(learner_step, resnet, SORO, 4, autocast=torch.bfloat16, replays=True)
    for title, target, habits in (
        ("augmentation, crop and flip", 1.05, {"augment": Compose([Crop(), Flip()])}),
        ("averaged weights", 1.02, {"average": 0.999}),
        ("schedule and clipping", 1.02, {"schedule": Cosine(10_000), "clip_norm": 1.0}),
    ):
        found = seconds_of({"with": make(**habits), "without": make()}, rounds)
        slower = ratio(found, "with", "without")
        table.add_row(
            f"ResNet-18, T = 4 and memory: {title}",
            *(f"{1e3 * median(found[name]):.2f} ms" for name in ("with", "without")),
            *(f"{slower:.3f}× the time", f"at most {target:.2f}×", "yes" if slower <= target else "no"),
        )


def add_memory(table: Table, tasks: int) -> None:
    row = sum(parameter.numel() for parameter in ResNet18().parameters()) * 4 / 2**20
    ours, plain = measured_peak("SORO", tasks), measured_peak("plain", tasks)
    most = ours / (plain + tasks * row)
    table.add_row(
        f"ResNet-18, T = {tasks}: peak memory of SORO against a plain step ({plain:.0f} MiB) and a T×n buffer",
        *(f"{ours:.0f} MiB", f"{plain + tasks * row:.0f} MiB", f"{most:.2f}×", "at most 1.1×"),
        "yes" if most <= 1.1 else "no",
    )


def gradient(kind: str) -> Step:
    """One gradient, from forward to backward pass, prepared in one of four ways."""
    (x, y), *_ = batches(resnet, 1)
    net, head, labels = resnet(), nn.Linear(512, CLASSES, device=GPU), y.to(GPU)
    parameters = [*net.parameters(), *head.parameters()]
    modes = {"torch.compile": "default", "torch.compile, reduce-overhead": "reduce-overhead"}
    run = torch.compile(net, mode=modes[kind]) if kind in modes else net

    def work() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = cross_entropy(head(run(x)), labels)
        torch.autograd.grad(loss, parameters)

    return captured(work) if kind == "CUDA graph" else work


def captured(work: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()

    def replay(kept: Step = work) -> None:  # the graph reads tensors that only `work` keeps alive
        graph.replay()

    return replay


def gradient_seconds(kind: str, rounds: int) -> tuple[float, float]:
    """The time of a gradient, and that of its preparation beyond what an eager one takes."""
    gradient("eager")()
    torch.cuda.synchronize()
    begin = perf_counter()
    step = gradient(kind)
    step()
    torch.cuda.synchronize()
    prepared = perf_counter() - begin
    return median(seconds_of({kind: step}, rounds)[kind]), prepared


def gradient_table(rounds: int) -> Table:
    table = Table(title="A gradient of 128 images, ResNet-18, bfloat16, each in its own process", title_justify="left")
    for heading in ("", "a gradient", "of eager", "to prepare"):
        table.add_column(heading, justify="right" if heading else "left")
    eager = None
    for kind in ("eager", "CUDA graph", "torch.compile", "torch.compile, reduce-overhead"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
            taken, prepared = fresh_process.submit(gradient_seconds, kind, rounds).result()
        eager = eager or taken
        table.add_row(kind, f"{1e3 * taken:.2f} ms", f"{taken / eager:.2f}×", f"{prepared:.2f} s")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a training step on a GPU.")
    parser.add_argument("--rounds", type=int, default=5, help="times 50 steps of each variant")
    parser.add_argument("--compile", action="store_true", help="compare also with torch.compile, which takes a minute")
    arguments = parser.parse_args()
    console = Console(width=150)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    table = judged_table(f"Steps of {BATCH} images a task")
    add_memory(table, tasks=8)
    add_speed(table, arguments.rounds)
    add_habits(table, arguments.rounds)
    console.print(table)
    if arguments.compile:
        console.print(gradient_table(arguments.rounds))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
