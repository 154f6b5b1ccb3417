"""The DBT gradient of a ResNet-18's convolutions: closed form against autograd through `conv2d(K, K)`.

Times are medians of alternating repetitions in one process, on one thread and on all: compare them on an idle machine.
Peak memory is the growth of the resident set's high-water mark during one pass, each in a fresh process that already
holds the weights, the gradients and the loaded libraries.

    python benchmarks/dbt.py
"""

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import conv2d

from spcl.orthogonality import add_orthogonality_gradient

REPETITIONS = 5
Gradients = dict[nn.Parameter, Tensor]


def resnet18_convolutions() -> nn.ModuleList:
    """The 20 convolutions of a ResNet-18 with a 3×3 stem."""
    shapes = [(3, 64, 3, 1)] + 4 * [(64, 64, 3, 1)]
    for width in (64, 128, 256):
        shapes += [(width, 2 * width, 3, 2), (width, 2 * width, 1, 2)] + 3 * [(2 * width, 2 * width, 3, 1)]
    return nn.ModuleList(nn.Conv2d(i, o, size, stride, bias=False) for i, o, size, stride in shapes)


def zero_gradients(convolutions: nn.ModuleList) -> Gradients:
    return {parameter: torch.zeros_like(parameter) for parameter in convolutions.parameters()}


def by_closed_form(convolutions: nn.ModuleList, gradients: Gradients) -> None:
    add_orthogonality_gradient(convolutions, gradients)


def by_autograd(convolutions: nn.ModuleList, gradients: Gradients) -> None:
    for convolution in convolutions:
        kernel, stride = convolution.weight, convolution.stride[0]
        padding = (kernel.shape[-1] - 1) // stride * stride
        correlation = conv2d(kernel, kernel, padding=padding, stride=stride)
        centre = padding // stride
        correlation[:, :, centre, centre].diagonal().sub_(1)
        gradients[kernel] += torch.autograd.grad(correlation.square().sum(), kernel)[0]


def seconds(work: Callable[[nn.ModuleList, Gradients], None], convolutions: nn.ModuleList) -> float:
    gradients = zero_gradients(convolutions)
    start = perf_counter()
    work(convolutions, gradients)
    return perf_counter() - start


def peak_megabytes(work: Callable[[nn.ModuleList, Gradients], None]) -> float:
    small = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, stride=2), nn.Conv2d(8, 8, 1)])
    work(small, zero_gradients(small))
    convolutions = resnet18_convolutions()
    gradients = zero_gradients(convolutions)
    for gradient in gradients.values():
        gradient.fill_(0)  # touches the pages, which zeros_like only promises
    before = high_water_mark()
    work(convolutions, gradients)
    return (high_water_mark() - before) / 2**20


def high_water_mark() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # where a child's ru_maxrss starts at its parent's
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def relative_difference(convolutions: nn.ModuleList) -> float:
    ours, theirs = zero_gradients(convolutions), zero_gradients(convolutions)
    by_closed_form(convolutions, ours)
    by_autograd(convolutions, theirs)
    return max(((ours[p] - theirs[p]).norm() / theirs[p].norm()).item() for p in convolutions.parameters())


def measure_memory() -> tuple[float, float]:
    peaks = []
    for work in (by_closed_form, by_autograd):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
            peaks.append(fresh_process.submit(peak_megabytes, work).result())
    return peaks[0], peaks[1]


def measure_time(convolutions: nn.ModuleList, threads: int) -> tuple[float, float]:
    torch.set_num_threads(threads)
    times = [(seconds(by_closed_form, convolutions), seconds(by_autograd, convolutions)) for _ in range(REPETITIONS)]
    ours, theirs = zip(*times, strict=True)
    return median(ours), median(theirs)


def main() -> None:
    torch.manual_seed(0)
    table = Table(title="DBT gradient of a ResNet-18's convolutions, CPU")
    for heading in ("", "closed form", "autograd", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    convolutions = resnet18_convolutions()
    table.caption = f"largest relative difference of the two gradients: {relative_difference(convolutions):.1e}"
    for threads in sorted({1, torch.get_num_threads()}):
        ours, theirs = measure_time(convolutions, threads)
        table.add_row(f"time, {threads} thread(s)", f"{ours:.3f} s", f"{theirs:.3f} s", f"{theirs / ours:.1f}×")
    ours, theirs = measure_memory()
    table.add_row("peak memory", f"{ours:.0f} MiB", f"{theirs:.0f} MiB", f"{theirs / ours:.1f}×")
    Console().print(table)


if __name__ == "__main__":
    main()
