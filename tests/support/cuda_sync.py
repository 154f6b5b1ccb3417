"""Checks that code does not wait for the CUDA device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["synchronization_forbidden"]


@contextmanager
def synchronization_forbidden() -> Iterator[None]:
    """Raise on operations within the block that synchronize with the device; restore the mode afterwards."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: int | str) -> None:
    # PyTorch warns once per process that this mode is a prototype, after it has set the mode: where warnings are
    # errors, the call raises and leaves the mode on.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)
