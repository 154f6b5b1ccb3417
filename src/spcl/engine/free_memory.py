"""How much memory a device has left."""

from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["free_memory"]


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that tensors on a device can still take, or None where the system does not say.

    Memory that PyTorch has reserved on a GPU and does not use counts as free; on a CPU so does what the system can
    reclaim, up to the limit of the process's control group.

    >>> free = free_memory(torch.device("cpu"))
    >>> free is None or free > 0
    True
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    return min((each for each in (_available(), _left_in_group()) if each is not None), default=None)


def _available() -> int | None:
    """Return what Linux estimates to be available."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


def _left_in_group() -> int | None:
    """Return what is left of the limit of the control group, as containers have one."""
    with suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        limit, used = (int((folder / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit - used + int(statistics["inactive_file"])
    return None
