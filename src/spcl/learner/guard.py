"""Keeping batch-norm averages clean of a batch that turned out not to be finite."""

import torch
from torch import nn

__all__ = ["BufferGuard"]


class BufferGuard:
    """Remembers the floating-point buffers of a module, to set them back when a step spoilt them.

    A batch with NaN leaves its mark on the running averages of batch-norm during the forward pass, before anything is
    known about its loss.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self._copies = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def remember(self) -> None:
        """Take the buffers as they are for good."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    @torch.no_grad()
    def restore_if_not_finite(self) -> None:
        """Set the buffers back if any of them is not finite."""
        if not all(bool(buffer.isfinite().all()) for buffer in self._buffers):
            torch._foreach_copy_(self._buffers, self._copies)
