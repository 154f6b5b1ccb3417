"""The smallest kernel: whether it runs shows whether kernels can be compiled on this machine."""

import torch
import triton
import triton.language as tl

__all__ = ["launch_first"]


def launch_first(device: torch.device) -> None:
    """Compile a kernel and run it; raise what the compiler raises."""
    number = torch.ones(1, device=device)
    _double[(1,)](number)
    if number.item() != 2.0:
        raise RuntimeError(f"a kernel computed {number.item()} instead of 2")


@triton.jit
def _double(number):
    """Double a number."""
    tl.store(number, 2.0 * tl.load(number))
