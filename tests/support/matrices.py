"""Matrices with prescribed singular values."""

import torch
from torch import Tensor


def with_condition(rows: int, columns: int, condition: float, seed: int = 0) -> Tensor:
    """A rows×columns matrix with singular values spaced evenly, on a logarithmic scale, from 1 down to 1/condition."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    U, V = (torch.linalg.qr(normal(size, rank, generator))[0] for size in (rows, columns))
    S = torch.logspace(0.0, -torch.log10(torch.tensor(condition)).item(), rank, dtype=torch.float64)
    return (U * S) @ V.T


def normal(rows: int, columns: int, generator: torch.Generator | int = 0) -> Tensor:
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
