"""How long a GPU is at work, from what PyTorch's profiler has recorded."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import profile

__all__ = ["gpu_events", "microseconds_at_work"]


def gpu_events(profiler: profile) -> Iterator[Any]:
    """Yield the kernels and copies of a GPU."""
    return (event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA)


def microseconds_at_work(profiler: profile) -> float:
    """Return for how long any kernel or copy was running; those on several streams run side by side."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in gpu_events(profiler))
    total, last = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
