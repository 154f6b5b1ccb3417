"""What separate gradients of many sources add on the MLP to plain training on the joint batch, part by part.

The additional arithmetic of a SORO step, each part measured by itself in processor time: rows of weight gradients
instead of one, their Gramian, and their weighted sum. What a step takes beyond both is calls: of PyTorch, NumPy and
Python around small tensors, less what stacked heads and an update of all tensors in one call save.

    python benchmarks/sources_floor.py [--sources 4 16 64] [--rounds 40]
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from time import process_time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sources import CLASSES, NETWORKS, VARIANTS
from spcl.aggregation.factors import FactoredGradients
from spcl.aggregation.gramians import gramian_and_numbers

WIDTHS = (784, 128, 64)
Work = Callable[[], object]


def arithmetic(sources: int, samples: int) -> dict[str, list[Work]]:
    """Return what separate gradients add to plain ones, as the engine computes it, and the plain ones."""
    layers = [(torch.randn(samples, height), torch.randn(samples, width)) for width, height in pairwise(WIDTHS)]
    factored = [pair for pair in layers if FactoredGradients.are_faster(*pair, sources)]
    factors = [FactoredGradients(*pair, [samples // sources] * sources) for pair in factored]
    dense = [pair for pair in layers if not FactoredGradients.are_faster(*pair, sources)]
    rows = torch.randn(sources, sum(left.shape[1] * right.shape[1] for left, right in dense))
    weights, numbers = torch.randn(sources), torch.empty(0, dtype=torch.float64)
    return {
        "plain": [partial(torch.mm, left.T, right) for left, right in layers],
        "rows": [partial(write_rows, rows, dense)],
        "Gramian": [lambda: gramian_and_numbers([*factors, rows], numbers)],
        "sum": [partial(torch.mv, rows.T, weights), *(partial(each.weighted_sum, weights) for each in factors)],
    }


def write_rows(rows: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the weight gradients of all segments into their rows."""
    start = 0
    for left, right in layers:
        height, width = left.shape[1], right.shape[1]
        block = rows[:, start : start + height * width].unflatten(1, (height, width))
        lefts, rights = left.view(len(rows), -1, height), right.view(len(rows), -1, width)
        block.zero_().baddbmm_(lefts.transpose(1, 2), rights)
        start += height * width


def measure(sources: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of all parts and steps, measured in turns."""
    network = NETWORKS["MLP"]
    size = network.samples // sources
    given: list[tuple[Tensor, Tensor]] = [
        (network.inputs(size), torch.randint(CLASSES, (size,))) for _ in range(sources)
    ]
    parts = arithmetic(sources, network.samples)
    works: list[tuple[str, Work]] = [(name, work) for name, some in parts.items() for work in some]
    for name in ("joint", "SORO"):
        step = VARIANTS[name](network.make(), sources)
        works.append((name, partial(step, given)))
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for times, (_, work) in zip(taken, works, strict=True):
            begin = process_time()
            work()
            times.append(1e3 * (process_time() - begin))
    found = dict.fromkeys(("plain", "rows", "Gramian", "sum", "joint", "SORO"), 0.0)
    for times, (name, _) in zip(taken, works, strict=True):
        found[name] += median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What separate gradients add on the MLP, part by part.")
    parser.add_argument("--sources", nargs="+", type=int, default=[4, 16, 64], help="numbers of sources")
    parser.add_argument("--rounds", type=int, default=40, help="measurements of every part")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="MLP, 512 samples, one thread, milliseconds", title_justify="left")
    headings = ("sources", "joint batch", "rows − plain", "Gramian", "sum", "with these", "SORO", "calls")
    for heading in headings:
        table.add_column(heading, justify="right")
    for sources in arguments.sources:
        found = measure(sources, arguments.rounds)
        rows = found["rows"] - found["plain"]
        floor = found["joint"] + rows + found["Gramian"] + found["sum"]
        parts = (found["joint"], rows, found["Gramian"], found["sum"])
        ratios = (f"{floor / found['joint']:.2f}×", f"{found['SORO'] / found['joint']:.2f}×")
        table.add_row(str(sources), *(f"{part:.2f}" for part in parts), *ratios, f"{found['SORO'] - floor:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
