"""The ranks of a run: how they find each other, in the variables that ``torchrun`` sets, and what they split."""

import os
import socket

from spcl.distributed import World, join_world

__all__ = ["Endpoint", "free_port", "join_ranks", "rank_environment"]

SPLIT = "SPCL_SPLIT"
"""The variable that says what the ranks of a grid's run split; :class:`spcl.distributed.World` has the values."""


Endpoint = tuple[str, int]
"""Address and port at which the ranks of a run find each other: those of the first."""


def free_port() -> int:
    """Return a port of this machine that no program uses now."""
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
    return port


def rank_environment(
    rank: int, size: int, endpoint: Endpoint, *, split: str = "tasks", on_this_machine: bool = True
) -> dict[str, str]:
    """Return the environment in which a process is one of ``size`` ranks, for :func:`join_ranks`.

    They are all on one machine, or else each sees no GPUs but its own.

    >>> rank_environment(1, 2, ("alpha", 29500), on_this_machine=False)["LOCAL_RANK"]
    '0'
    """
    address, port = endpoint
    local_rank, local_size = (rank, size) if on_this_machine else (0, 1)
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        SPLIT: split,
    }
    return {name: str(value) for name, value in values.items()}


def join_ranks() -> World | None:
    """Return the ranks of which the environment says that this process is one, or None where it is the only one."""
    return join_world(os.environ.get(SPLIT, "tasks"))
