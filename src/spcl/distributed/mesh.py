"""How ranks split the work of a step: by tasks, by samples, or both."""

import re

from spcl.errors import SpclError

__all__ = ["mesh_shape"]


def mesh_shape(split: str, ranks: int) -> tuple[int, int]:
    """Return the number of groups of ranks with different tasks, and of the ranks in each with different samples.

    >>> mesh_shape("tasks", 4), mesh_shape("data", 4), mesh_shape("2x2", 4)
    ((4, 1), (1, 4), (2, 2))
    >>> mesh_shape("2x2", 3)
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: the split 2x2 is for 4 ranks, but there are 3; start 4, or choose 'tasks' or 'data'
    """
    if split in ("tasks", "data"):
        return (ranks, 1) if split == "tasks" else (1, ranks)
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", split)
    if found is None:
        raise SpclError(
            f"the split is {split!r}; give 'tasks', 'data', or the number of task groups and of the ranks that share "
            f"the batches of each, such as '2x4'"
        )
    groups, shares = int(found[1]), int(found[2])
    if groups * shares != ranks:
        raise SpclError(
            f"the split {split} is for {groups * shares} ranks, but there are {ranks}; start {groups * shares}, or "
            f"choose 'tasks' or 'data'"
        )
    return groups, shares
