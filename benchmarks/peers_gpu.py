"""A step of experience replay: `spcl`, a loop in plain PyTorch, and Avalanche.

All train a ResNet-18 with the same normalisation in channels_last, with Adam (fused, capturable) and bfloat16 autocast,
class-incrementally on a new task of 10 classes and a memory of an earlier one of 10, as many images of each in a step.
In every round all take the same number of steps in turn, in one process, after a round that is not counted; ratios are
medians of the ratios within a round. Images are bytes. What a step comprises differs:

- `spcl`: images on the GPU and labels on the host, checks of the batch, a draw from memory, a pass over the new images
  and one over the replayed ones, the check that their gradients are finite, the update; and memory observes the batch.
- plain PyTorch: images, labels and memory on the GPU, a draw, one pass over the joint batch, the update. The new images
  are not stored.
- Avalanche, its loaders: `Naive` with `ReplayPlugin`, no metrics; the loader shuffles and collates the joint batch on
  the host (`num_workers=0`, its default) and copies it to the GPU, one pass, the update. Storing images, which happens
  at the end of a task, and the set-up of the loaders are not counted.
- Avalanche, prepared batches: the same, with all joint batches on the GPU before the clock starts, so that what is left
  is a plain step without the draw, and Avalanche's callbacks.

LibMTL has no replay, and Mammoth is no installable package: neither is here. On a CPU, which is only for trying the
script, there is no autocast.

    pip install avalanche-lib==0.6.0
    python benchmarks/peers_gpu.py [--rounds 5] [--steps 50] [--batch 128] [--device cuda]
"""

import argparse
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import ER
from spcl.models import Backbone, Normalise, ResNet18

CLASSES = 10  # of either task
EARLIER, MEMORY = 10, 8  # batches of images: of the earlier task, and in memory
SPCL, PLAIN = "spcl: Learner, ER", "plain PyTorch"
LOADED, PREPARED = "Avalanche, its loaders", "Avalanche, prepared batches"
Round = Callable[[], float]
"""Take some steps and return the seconds that they took."""


# -- what is trained


@dataclass(frozen=True)
class Problem:
    """A new task and an earlier one, on the host."""

    device: torch.device
    batch: int
    steps: int

    def images(self, batches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(batches)
        count = batches * self.batch
        x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return x, torch.randint(CLASSES, (count,), generator=generator)

    @property
    def earlier(self) -> tuple[Tensor, Tensor]:
        return self.images(EARLIER)

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        return self.images(self.steps)

    @property
    def memory(self) -> int:
        return MEMORY * self.batch

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.device.type == "cuda" else None

    def backbone(self) -> nn.Module:
        torch.manual_seed(0)
        net = Backbone(Normalise([0.5] * 3, [0.25] * 3), ResNet18())
        return net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def adam(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, fused=True, capturable=self.device.type == "cuda")

    def synchronised_clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()


class Classifier(nn.Module):
    """The backbone and one head for the classes of both tasks, in autocast; float32 logits."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.backbone = problem.backbone()
        self.head = nn.Linear(512, 2 * CLASSES, device=problem.device)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.problem.device.type, self.problem.autocast, self.problem.autocast is not None):
            return self.head(self.backbone(x)).float()


# -- who trains


def spcl_round(problem: Problem) -> Round:
    learner = Learner(
        problem.backbone(),
        ER(),
        optimizer=problem.adam,
        memory=BalancedCoreset(problem.memory, device=problem.device),
        memory_batch=problem.batch,
        scenario="class",
        autocast=problem.autocast,
    )

    def steps(task: str, x: Tensor, y: Tensor) -> None:
        for batch in zip(x.split(problem.batch), y.split(problem.batch), strict=True):
            learner.step({task: batch})

    x, y = problem.earlier
    learner.add_task("earlier", classes=CLASSES)
    steps("earlier", x.to(problem.device), y)
    learner.finish_task("earlier")
    learner.add_task("new", classes=CLASSES)
    x, y = problem.new
    x = x.to(problem.device)
    return lambda: seconds(problem, lambda: steps("new", x, y))


def plain_round(problem: Problem) -> Round:
    """Experience replay as everyone writes it: one cross-entropy over new and replayed images."""
    net = Classifier(problem)
    optimizer = problem.adam(list(net.parameters()))
    memory_x, memory_y = (each[: problem.memory].to(problem.device) for each in problem.earlier)
    new_x, new_y = (each.to(problem.device) for each in problem.new)

    def steps() -> None:
        for x, y in zip(new_x.split(problem.batch), (new_y + CLASSES).split(problem.batch), strict=True):
            drawn = torch.randint(len(memory_x), (problem.batch,), device=problem.device)
            loss = cross_entropy(net(torch.cat([x, memory_x[drawn]])), torch.cat([y, memory_y[drawn]]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return lambda: seconds(problem, steps)


def avalanche_round(problem: Problem, *, prepared: bool) -> Round:
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_avalanche_dataset
    from avalanche.training import Naive
    from avalanche.training.plugins import ReplayPlugin
    from avalanche.training.storage_policy import ReservoirSamplingBuffer

    class FirstTask(ReservoirSamplingBuffer):
        """Memory of the first task alone, as every round trains the second one again."""

        def update(self, strategy: Any, **kwargs: Any) -> None:
            if len(self.buffer) == 0:
                self.post_adapt(strategy, strategy.experience)

    class Timed(Naive):
        """Training whose epochs are timed."""

        seconds = 0.0

        def training_epoch(self, **kwargs: Any) -> None:
            if prepared:
                self.dataloader = [[each.to(problem.device) for each in batch] for batch in self.dataloader]
            self.seconds = seconds(problem, lambda: super(Timed, self).training_epoch(**kwargs))

    net = Classifier(problem)
    strategy = Timed(
        model=net,
        optimizer=problem.adam(list(net.parameters())),
        train_mb_size=problem.batch,
        device=problem.device,
        plugins=[ReplayPlugin(problem.memory, storage_policy=FirstTask(problem.memory))],
        evaluator=None,
    )
    (x, y), (new_x, new_y) = problem.earlier, problem.new
    tasks = [as_avalanche_dataset(TensorDataset(x, y)), as_avalanche_dataset(TensorDataset(new_x, new_y + CLASSES))]
    earlier, new = benchmark_from_datasets(train=tasks).train_stream
    strategy.train(earlier)

    def measure() -> float:
        strategy.train(new)
        return strategy.seconds

    return measure


# -- what is measured


def seconds(problem: Problem, work: Callable[[], object]) -> float:
    begin = problem.synchronised_clock()
    work()
    return problem.synchronised_clock() - begin


def measured(variants: Mapping[str, Round], rounds: int) -> dict[str, list[float]]:
    """The seconds of every variant in every round, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name, take in variants.items():
            taken = take()
            if index > 0:
                found[name].append(taken)
    return found


def prepared_variants(problem: Problem) -> tuple[dict[str, Round], dict[str, str]]:
    """The variants that can run here, and why the others cannot."""
    variants = {SPCL: spcl_round(problem), PLAIN: plain_round(problem)}
    skipped = {}
    for name, prepared in ((PREPARED, True), (LOADED, False)):
        try:
            variants[name] = avalanche_round(problem, prepared=prepared)
        except ImportError as error:
            skipped[name] = f"skipped: {error}"
    return variants, skipped


def result_table(problem: Problem, rounds: int) -> Table:
    variants, skipped = prepared_variants(problem)
    found = measured(variants, rounds)
    title = f"Experience replay, ResNet-18, {problem.batch} new and {problem.batch} replayed images a step"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = (
        "spcl checks and stores the new images, the others do not; Avalanche's loaders collate on the host and copy."
    )
    for heading in ("", "a step", "against spcl", "target", "met"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, taken in found.items():
        time = f"{1e3 * median(taken) / problem.steps:.2f} ms"
        slower = median(peer / ours for peer, ours in zip(taken, found[SPCL], strict=True))
        judged = (f"{slower:.2f}× the time", "at least 1.00×", "yes" if slower >= 1.0 else "no")
        table.add_row(name, time, *(("", "", "") if name == SPCL else judged))
    for name, reason in skipped.items():
        table.add_row(name, reason)
    return table


def versions() -> str:
    found = [f"torch {torch.__version__}", f"spcl {version('spcl')}"]
    with suppress(PackageNotFoundError):
        found.append(f"avalanche-lib {version('avalanche-lib')}")
    return ", ".join(found)


def main() -> None:
    warnings.filterwarnings("ignore", module="avalanche")  # that there are no loggers
    parser = argparse.ArgumentParser(description="Experience replay in spcl, in plain PyTorch and in Avalanche.")
    parser.add_argument("--rounds", type=int, default=5, help="how often every variant takes its steps")
    parser.add_argument("--steps", type=int, default=50, help="steps of a variant in a round")
    parser.add_argument("--batch", type=int, default=128, help="new images in a step, and replayed ones")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    arguments = parser.parse_args()
    problem = Problem(torch.device(arguments.device), arguments.batch, arguments.steps)
    console = Console(width=150)
    device = torch.cuda.get_device_name() if problem.device.type == "cuda" else "CPU"
    console.print(f"{device}, {versions()}")
    console.print(result_table(problem, arguments.rounds))


if __name__ == "__main__":
    main()
