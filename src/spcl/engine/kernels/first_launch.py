"""The smallest kernel: that it can be launched shows that kernels can be compiled on this machine."""

import torch
import triton
import triton.language as tl

__all__ = ["launch_first"]


def launch_first(device: torch.device) -> None:
    """Compile a kernel and launch it; raise what the compiler raises."""
    _double[(1,)](torch.ones(1, device=device))


@triton.jit
def _double(number):
    """Double a number."""
    tl.store(number, 2.0 * tl.load(number))
