"""Which tensors there are Triton kernels for."""

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["DEVICES", "MOST_NUMBERS", "has_kernels"]

DEVICES = {"cuda"}
"""Types of devices that run kernels."""

MOST_NUMBERS = 2**31 - 2**10
"""Kernels count the numbers of a tensor, and some beyond its end, in 32 bits."""


def has_kernels(x: Tensor) -> bool:
    """Return whether there are kernels for such images: on a GPU, where Triton is installed and works."""
    return x.device.type in DEVICES and x.ndim == 4 and 0 < x.numel() < MOST_NUMBERS and _triton_works(x.device)


@cache
def _triton_works(device: torch.device) -> bool:
    """Return whether kernels can be compiled for a device, for which Triton needs a C compiler; warn if they cannot."""
    if find_spec("triton") is None:
        return False
    from spcl.engine.kernels.first_launch import launch_first

    try:
        launch_first(device)
    except Exception as error:  # of Triton, the compiler or the driver
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(
            f"Triton cannot compile kernels ({reason}), so that PyTorch's are used, which are slower; install a C "
            "compiler and the headers of Python",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
