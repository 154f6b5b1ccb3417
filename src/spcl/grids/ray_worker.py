"""The task of a Ray worker: one run."""

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spcl.files import write_json
from spcl.grids.transfer import read_files, with_local_sources
from spcl.grids.worker import attempt
from spcl.runs import RunFolder, RunSettings

__all__ = ["Order", "make_run"]


@dataclass(frozen=True)
class Order:
    """A run to make.

    Attributes:
        number: tells its messages from those of other runs.
        settings: its settings, as plain data.
        out: its folder.
        marker: a file in the folder, which a machine that shares the folder sees.
        sources: the files that its settings name, for machines that do not have them.
    """

    number: int
    settings: Mapping[str, Any]
    out: str
    marker: str
    sources: Mapping[str, bytes]


def make_run(order: Order, queue: Any) -> dict[str, Any]:
    """Make the run on this node, put its steps into the queue, and return the message of how it ended.

    Where the node does not share the run's folder, the run starts from the beginning in a folder of its own, and the
    message of a complete run holds its files.
    """
    node = _node_name()

    def send(event: str, **values: Any) -> None:
        queue.actor.put.remote((order.number, {"event": event, **values, "node": node}))  # does not wait, unlike put()

    given = RunSettings.model_validate(order.settings)
    settings = with_local_sources(given, order.sources)
    is_shared = (Path(order.out) / order.marker).exists()
    with nullcontext(order.out) if is_shared else tempfile.TemporaryDirectory(prefix="spcl-run-") as out:
        ended = attempt(settings, Path(out), send)
        if ended["event"] == "done" and settings != given:
            write_json(RunFolder(Path(out)).settings, order.settings)
        if ended["event"] == "done" and not is_shared:
            ended["files"] = read_files(Path(out))
    return {**ended, "node": node}


def _node_name() -> str:
    """Return the name that this node was given in the cluster, or else its host name."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    named = node["NodeName"] != node["NodeManagerAddress"]
    return str(node["NodeName"] if named else node["NodeManagerHostname"])
