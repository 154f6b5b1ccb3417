"""The task of a Ray worker: one run, or one of its ranks."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spcl.distributed import World, leave_world
from spcl.errors import SpclError
from spcl.files import write_json
from spcl.grids.base import failure
from spcl.grids.ranks import Endpoint, free_port, join_ranks, rank_environment
from spcl.grids.transfer import read_files, with_local_sources
from spcl.grids.worker import attempt
from spcl.runs import RunFolder, RunSettings

__all__ = ["BEGUN", "Order", "find_endpoint", "make_run"]

BEGUN = "begun"
"""The event of one of several ranks that has begun, from which the pool learns its node."""


@dataclass(frozen=True)
class Order:
    """A run to make.

    Attributes:
        number: tells its messages from those of other runs.
        settings: its settings, as plain data.
        out: its folder.
        marker: a file in the folder, which a machine that shares the folder sees.
        sources: the files that its settings name, for machines that do not have them.
        ranks: how many processes make it together.
        split: what they split.
    """

    number: int
    settings: Mapping[str, Any]
    out: str
    marker: str
    sources: Mapping[str, bytes]
    ranks: int = 1
    split: str = "tasks"


def make_run(order: Order, queue: Any, rank: int = 0, endpoint: Endpoint | None = None) -> dict[str, Any]:
    """Make the run on this node, put its steps into the queue, and return the message of how it ended.

    Where the node does not share the run's folder, the run starts from the beginning in a folder of its own, and the
    message of a complete run holds its files. With the ``endpoint`` of several ranks, this process is one of them, and
    makes this run alone; the first one writes.
    """
    node = _node_name()

    def send(event: str, **values: Any) -> None:
        queue.actor.put.remote((order.number, rank, {"event": event, **values, "node": node}))  # does not wait

    if endpoint is not None:
        queue.put((order.number, rank, {"event": BEGUN, "node": node}))  # waits, so that it is known before any step
    given = RunSettings.model_validate(order.settings)
    settings = with_local_sources(given, order.sources)
    is_shared = rank > 0 or (Path(order.out) / order.marker).exists()
    try:
        world = None if endpoint is None else _join(rank, order, endpoint)
    except SpclError as error:
        return {**failure(str(error)), "node": node}
    with nullcontext(order.out) if is_shared else tempfile.TemporaryDirectory(prefix="spcl-run-") as out:
        ended = attempt(settings, Path(out), send, world)
        if rank == 0 and ended["event"] == "done" and settings != given:
            write_json(RunFolder(Path(out)).settings, order.settings)
        if ended["event"] == "done" and not is_shared:
            ended["files"] = read_files(Path(out))
    if ended["event"] == "done":
        leave_world()
    return {**ended, "node": node}


def find_endpoint() -> Endpoint:
    """Return where ranks find the one that will run on this node."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address()), free_port()


def _join(rank: int, order: Order, endpoint: Endpoint) -> World | None:
    is_local = False  # Ray shows each rank its own GPUs
    os.environ |= rank_environment(rank, order.ranks, endpoint, split=order.split, on_this_machine=is_local)
    return join_ranks()


def _node_name() -> str:
    """Return the name that this node was given in the cluster, or else its host name."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    named = node["NodeName"] != node["NodeManagerAddress"]
    return str(node["NodeName"] if named else node["NodeManagerHostname"])
