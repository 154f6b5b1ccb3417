"""What the GPU does in a step of ResNet-18: the time of its kernels, by name, and how long any of them runs.

The sum over kernels is what counts where many processes share a GPU; kernels on several streams run side by side.
Images and labels are random, so that gradients come to depend on one another and the Gramian is formed again in
float64 (the `gemm_f64`), as it seldom is on real data.

    python benchmarks/kernel_times_gpu.py [--most 20]
"""

import argparse
from collections import Counter
from collections.abc import Callable
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from at_work_gpu import gpu_events, microseconds_at_work
from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import ER, SORO, Method
from spcl.models import Backbone, Normalise, ResNet18
from step_gpu import GPU, Step, adam

CASES: dict[str, tuple[type[Method], int, int, int]] = {
    "PS-CIFAR-100, SORO": (SORO, 3, 128, 32),
    "PS-ImageNet-TINY, SORO": (SORO, 2, 32, 64),
    "PS-CIFAR-100, ER": (ER, 3, 128, 32),
}
CLASSES, STEPS = 10, 10


def step_of(method: type[Method], tasks: int, size: int, side: int) -> Step:
    """Return a step on `tasks` tasks of `size` samples, and `size` samples of memory."""
    torch.manual_seed(0)
    network = Backbone(Normalise([0.5] * 3, [0.25] * 3), ResNet18(batch_norm_momentum=0.01))
    network.to(GPU, memory_format=torch.channels_last)  # type: ignore[call-overload]
    memory = BalancedCoreset(1000, device=GPU)
    options = {"memory_batch": size, "autocast": torch.bfloat16}
    learner = Learner(network, method(), optimizer=adam, memory=memory, **options)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, device=GPU)
        return x, torch.randint(CLASSES, (size,))

    learner.add_task("earlier", classes=CLASSES)
    for _ in range(10):
        learner.step({"earlier": batch()})
    learner.finish_task("earlier")
    given = {str(task): batch() for task in range(tasks)}
    for task in given:
        learner.add_task(task, classes=CLASSES)
    return lambda: learner.step(given)


def milliseconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(4 * STEPS):
        step()
    torch.cuda.synchronize()
    return 1e3 * (perf_counter() - begin) / (4 * STEPS)


def kernels(step: Callable[[], object]) -> tuple[Counter[str], Counter[str], float]:
    """Return microseconds and launches of a step, by kernel, and for how many any kernel was running."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    spent, launches = Counter[str](), Counter[str]()
    for event in gpu_events(profiler):
        spent[event.name] += event.device_time_total / STEPS
        launches[event.name] += 1
    return spent, launches, microseconds_at_work(profiler) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description="The kernels of a step.")
    parser.add_argument("--most", type=int, default=20, help="kernels to show")
    most, console = parser.parse_args().most, Console(width=140)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, (method, tasks, size, side) in CASES.items():
        step = step_of(method, tasks, size, side)
        for _ in range(20):
            step()
        wall, (spent, launches, busy) = milliseconds(step), kernels(step)
        title = f"{name}, {tasks} × {size} and {size} of memory: {wall:.2f} ms a step, {launches.total() / STEPS:.0f} "
        title += f"kernels of {spent.total() / 1e3:.2f} ms, any of them for {busy / 1e3:.2f} ms"
        table = Table(title=title, title_justify="left")
        for heading in ("µs a step", "launches", "kernel"):
            table.add_column(heading, justify="left" if heading == "kernel" else "right", no_wrap=True)
        for kernel, time in spent.most_common(most):
            table.add_row(f"{time:.1f}", f"{launches[kernel] / STEPS:.0f}", kernel[:100])
        console.print(table)


if __name__ == "__main__":
    main()
