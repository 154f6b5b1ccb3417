"""The time of a step on up to 64 GPUs, as arithmetic: nothing here was measured on more than one GPU.

Computation is what one H200 took (``results/speed/gpu.txt``): an eager pass of a task of 128 images through ResNet-18,
and what a step does besides, which every rank repeats. Bandwidths are those that vendors state, latency is assumed.
Several ranks run eagerly. One GPU alone captures CUDA graphs: the last column compares with that, which is what more
GPUs have to beat.

T tasks on R ranks take ⌈T/R⌉ passes. A rank sends (R−1)/R · (⌈T/R⌉ + 1) · n numbers of 4 bytes, evenly to all others:
those on its node by NVLink, and at the same time those on other nodes by InfiniBand.

    python benchmarks/scaling_model.py
"""

import re
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from rich.console import Console
from rich.table import Table

RECORDS = Path(__file__).resolve().parents[1] / "results" / "speed"
GPUS_PER_NODE = 8
NVLINK = 450e9
"""Bytes per second that an H200 sends to others of its node: half of the 900 GB/s of NVLink 4, which are both ways."""
INFINIBAND = 50e9
"""Bytes per second that a GPU sends to other nodes: an NDR adapter of 400 Gb/s each."""
LATENCY = 30e-6
"""Seconds of a collective beside its bytes, assumed."""
COLLECTIVES = 5
"""Collective operations of a step: the check of the batches, rows for slices, the Gramian, the update, heads."""
RANKS = (1, 2, 4, 8, 16, 32, 64)
TASKS = (4, 16, 64)


@dataclass(frozen=True)
class Measured:
    """What a step of ResNet-18 costs on one GPU, in seconds, and its number n of parameters."""

    eager_pass: float
    captured_pass: float
    other: float
    numbers: int


def read_records() -> Measured:
    """Read the figures from the records of the benchmarks that measured them."""
    gpu, ranks = ((RECORDS / name).read_text(encoding="utf-8") for name in ("gpu.txt", "distributed.txt"))
    passes = gpu[gpu.index("A column of 128 images, ResNet-18") :]
    phases = gpu[gpu.index("Milliseconds a step, by phase") :]
    _, _, *other = re.findall(r"[\d.]+", _find(r"│ SORO, eager +│([^\n]*)", phases))  # without tasks and memory
    return Measured(
        eager_pass=1e-3 * float(_find(r"│ eager +│ +([\d.]+) ms", passes)),
        captured_pass=1e-3 * float(_find(r"│ CUDA graph +│ +([\d.]+) ms", passes)),
        other=1e-3 * sum(map(float, other)),
        numbers=int(_find(r"gradients of ([\d,]+) numbers", ranks).replace(",", "")),
    )


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


def exchange(tasks: int, ranks: int, numbers: int) -> float:
    """The seconds in which the ranks exchange gradients."""
    if ranks == 1:
        return 0.0
    sent = 4 * numbers * (ranks - 1) / ranks * (ceil(tasks / ranks) + 1)
    near = (min(ranks, GPUS_PER_NODE) - 1) / (ranks - 1)
    return max(sent * near / NVLINK, sent * (1 - near) / INFINIBAND) + COLLECTIVES * LATENCY


def table(tasks: int, measured: Measured) -> Table:
    made = Table(title=f"{tasks} tasks of 128 images, a pass of {1e3 * measured.eager_pass:.2f} ms each")
    for heading in ("GPUs", "nodes", "passes", "exchange", "repeated", "step", "speed-up", "of ideal", "of captured"):
        made.add_column(heading, justify="right")
    alone, captured = (tasks * each + measured.other for each in (measured.eager_pass, measured.captured_pass))
    for ranks in RANKS:
        parts = [ceil(tasks / ranks) * measured.eager_pass, exchange(tasks, ranks, measured.numbers), measured.other]
        step = sum(parts)
        times = [f"{1e3 * seconds:.2f} ms" for seconds in (*parts, step)]
        ratios = [f"{alone / step:.1f}×", f"{alone / step / ranks:.0%}", f"{captured / step:.1f}×"]
        made.add_row(str(ranks), str(ceil(ranks / GPUS_PER_NODE)), *times, *ratios)
    return made


def main() -> None:
    console, measured = Console(width=110), read_records()
    bandwidths = f"NVLink {NVLINK / 1e9:.0f} GB/s, InfiniBand {INFINIBAND / 1e9:.0f} GB/s per GPU"
    console.print(f"ResNet-18, n = {measured.numbers:,}; {bandwidths}; arithmetic, not measured", highlight=False)
    for tasks in TASKS:
        console.print(table(tasks, measured))


if __name__ == "__main__":
    main()
