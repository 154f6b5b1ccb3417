"""What solving SORO in T×T saves, and what a whole aggregation costs beside TorchJD's AlignedMTL."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchjd.aggregation import AlignedMTL

from spcl.aggregation import SORO, SOROSettings, gramian, solve_soro

SIGMA = LAMBDA = 100.0
ETA = 1.0 / (8.0 * SIGMA + 2.0)


def naive_soro(G: Tensor, iterations: int) -> Tensor:
    """Algorithm 1 as the paper prints it, on n×T matrices."""
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    G_hat: Tensor = U @ Vh
    d = torch.ones(G.shape[1])
    for _ in range(iterations):
        slope = 2.0 * (G_hat - G) + 4.0 * SIGMA * G_hat @ (G_hat.T @ G_hat - d.diag())
        G_hat = G_hat - ETA * slope
        A = G_hat.T @ G_hat
        d = (LAMBDA + SIGMA * A.diagonal()) / (LAMBDA + SIGMA)
        (G - G_hat).square().sum() + SIGMA * (A - d.diag()).square().sum() + LAMBDA * (d - 1.0).square().sum()
    return G_hat.sum(dim=1)


def alternate(ours: Callable[[], Tensor], rival: Callable[[], Tensor], repetitions: int) -> tuple[float, float]:
    """The median seconds of both, run in turns after one round that does not count."""
    seconds: dict[Callable[[], Tensor], list[float]] = {ours: [], rival: []}
    for round_ in range(repetitions + 1):
        for run, taken in seconds.items():
            start = perf_counter()
            run()
            if round_:
                taken.append(perf_counter() - start)
    return median(seconds[ours]), median(seconds[rival])


def solve_only() -> tuple[float, float]:
    G = torch.nn.functional.normalize(torch.randn(2_800_000, 5), dim=0) * torch.tensor([0.5, 1.0, 1.0, 2.0, 4.0])
    C = gramian(G.T)
    settings = SOROSettings.paper(sigma=SIGMA, lambda_=LAMBDA, eta=ETA)
    solution = solve_soro(C, settings)
    iterations = len(solution.objective) - 1
    torch.testing.assert_close(G @ solution.weights.float(), naive_soro(G, iterations), rtol=0.0, atol=1e-5)
    return alternate(lambda: solve_soro(C, settings).weights, lambda: naive_soro(G, iterations), 3)


def whole_aggregation() -> tuple[float, float]:
    rows, soro, aligned = torch.randn(20, 11_000_000), SORO(), AlignedMTL()
    return alternate(lambda: soro(rows), lambda: aligned(rows), 9)


def main() -> None:
    torch.manual_seed(0)
    table = Table(title=f"SORO on {torch.get_num_threads()} CPU threads, float32 gradients")
    for heading in ("measured", "SORO", "rival", "ratio", "target", "met"):
        table.add_column(heading, justify="left" if heading == "measured" else "right")
    ours, rival = solve_only()
    table.add_row(
        "solve in T×T against Algorithm 1 on n×T; T = 5, n = 2.8 M",
        *(f"{1e3 * ours:,.2f} ms", f"{1e3 * rival:,.0f} ms", f"{rival / ours:,.0f}× faster", "at least 1,000×"),
        "yes" if rival / ours >= 1000.0 else "no",
    )
    ours, rival = whole_aggregation()
    table.add_row(
        "Gramian, solve and combine against AlignedMTL; T = 20, n = 11 M, κ = 1",
        *(f"{1e3 * ours:,.0f} ms", f"{1e3 * rival:,.0f} ms", f"{ours / rival:.2f}× the time", "at most 1.2×"),
        "yes" if ours / rival <= 1.2 else "no",
    )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
