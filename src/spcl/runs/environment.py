"""Versions, hardware and source revision of a run."""

import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

import spcl
from spcl.distributed import World
from spcl.registry import installed_plugins
from spcl.runs.result import Environment

__all__ = ["current_environment"]


def current_environment(device: torch.device, world: World | None = None) -> Environment:
    """Describe the environment of a run on this device, or on those of all ranks."""
    return Environment(
        spcl=spcl.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        threads=torch.get_num_threads(),
        git=_git_commit(Path(__file__).parent),
        plugins=installed_plugins(),
        ranks=1 if world is None else world.size,
        split=None if world is None else world.split,
    )


@cache
def _git_commit(folder: Path) -> str | None:
    """Return the commit of a source tree, with "-dirty" if files differ from it, or None outside of one."""
    describe = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    try:
        answer = subprocess.run(["git", "-C", str(folder), *describe], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
