"""Which tensors there are Triton kernels for."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor

__all__ = ["DEVICES", "MOST_NUMBERS", "has_kernels"]

DEVICES = {"cuda"}
"""Types of devices that run kernels."""

MOST_NUMBERS = 2**31
"""Kernels count the numbers of a tensor in 32 bits."""


def has_kernels(x: Tensor) -> bool:
    """Return whether there are kernels for such images: on a GPU, where Triton is installed."""
    return x.device.type in DEVICES and x.ndim == 4 and x.numel() < MOST_NUMBERS and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
