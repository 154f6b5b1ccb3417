"""Precision of float32 matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

__all__ = ["are_products_exact", "float32_products"]

FULL = ("ieee", "none")
"""The settings of full precision."""

HAS_SETTINGS = hasattr(torch.backends.cuda.matmul, "fp32_precision")
"""Whether every kind of device has a setting of its own; PyTorch before 2.9 has one for all."""


def are_products_exact() -> bool:
    """Return whether float32 products are computed in full precision, as they are by default.

    >>> with float32_products("ieee"):
    ...     are_products_exact()
    True
    """
    if not HAS_SETTINGS:
        return torch.get_float32_matmul_precision() == "highest"
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return gpu.fp32_precision in FULL and cpu.fp32_precision in FULL


@contextmanager
def float32_products(kind: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Compute float32 products within the block in full precision (``ieee``), or on a GPU in TF32 (``tf32``).

    PyTorch's own settings, which may allow TF32 on a GPU and bfloat16 on a CPU, are restored afterwards.

    >>> with float32_products("ieee"):
    ...     product = torch.ones(2, 3) @ torch.ones(3, 2)
    """
    if not HAS_SETTINGS:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if kind == "ieee" else "high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = gpu.fp32_precision, cpu.fp32_precision
    try:
        gpu.fp32_precision, cpu.fp32_precision = kind, "ieee"
        yield
    finally:
        gpu.fp32_precision, cpu.fp32_precision = before
