"""Which arithmetic products of float32 matrices are formed in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

__all__ = ["float32_products"]


@contextmanager
def float32_products(kind: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Within the block float32 products are exact to float32 (``ieee``), or on a GPU as fast as TF32 is (``tf32``).

    PyTorch may be set to TF32 on a GPU and to bfloat16 on a CPU; afterwards it is as it was.

    >>> with float32_products("ieee"):
    ...     product = torch.ones(2, 3) @ torch.ones(3, 2)
    """
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # PyTorch before 2.9 has one setting for all
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
