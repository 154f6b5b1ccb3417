"""What makes the runs of a grid: the program of a local worker process, and the task of a Ray worker.

A run may have several processes, its ranks. All of them make it together; the first one reports how it ended, and the
others report only that they failed.
"""

import faulthandler
import gc
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from spcl._util.files import atomic_write, user_errors, write_json
from spcl.distributed import World, join_world, leave_world
from spcl.errors import LostRankError, OtherRankError, OutOfMemoryError, SpclError
from spcl.grids.base import failure
from spcl.learner import StepReport
from spcl.runs import (
    FolderInUseError,
    InterruptedRunError,
    Problem,
    RunFolder,
    RunSettings,
    SilentView,
    execute,
)

REPORT_SECONDS = 0.2
LOST_RANK_SECONDS = 30.0
"""Seconds to wait before reporting a lost peer: the pool usually notices the dead process first and knows why."""
STOPPED_BY_OTHER = "stopped by another rank"
BEGUN = "begun"
"""The event by which a pool learns the node of a rank that has begun."""
SPLIT = "SPCL_SPLIT"
"""The environment variable that says what the ranks of a run split, in the words of ``spcl.distributed.World``."""

Send = Callable[..., None]
Endpoint = tuple[str, int]
"""Address and port of the first rank, where the ranks of a run find each other."""


# -- a run, wherever it is made


def attempt(settings: RunSettings, out: Path, send: Send, world: World | None = None) -> dict[str, Any]:
    """Make or resume a run, send its steps, and return the message of how it ended; free the memory it used."""
    ended = _attempt(settings, out, send, world)
    if ended["event"] != "done":
        gc.collect()  # the traceback of a failed run may still hold its tensors
    torch.cuda.empty_cache()  # other processes share the GPU
    return ended


def is_report(ended: Mapping[str, Any], is_first: bool) -> bool:
    """Return whether a message of one of the ranks of a run says how the run ended."""
    return ended["event"] == "failed" or (is_first and ended["event"] != STOPPED_BY_OTHER)


def _attempt(settings: RunSettings, out: Path, send: Send, world: World | None) -> dict[str, Any]:
    try:
        folder = RunFolder(out)
        if folder.settings.exists() and folder.read_settings() is None:
            raise SpclError(f"{folder.settings} is damaged; remove the folder to repeat the run")
        result = execute(settings, out, resume=True, view=_ReportingView(send), distributed=world)
    except InterruptedRunError as error:
        return {"event": "interrupted", "reason": str(error)}
    except FolderInUseError:
        return {"event": "busy"}
    except OtherRankError:
        return {"event": STOPPED_BY_OTHER}
    except LostRankError as error:
        time.sleep(LOST_RANK_SECONDS)
        return failure(str(error))
    except SpclError as error:
        out_of_memory = isinstance(error, OutOfMemoryError)  # not a user error: other processes may free memory later
        return failure(str(error), user_error=not out_of_memory, out_of_memory=out_of_memory)
    except Exception as error:
        return failure(f"{type(error).__name__}: {error}", traceback.format_exc())
    return {"event": "done", "summary": result.summary, "skipped": sum(result.left_out.values())}


class _ReportingView(SilentView):
    """Send the step of a run a few times a second."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent_at = 0.0
        self._steps = 0

    def begin(self, settings: RunSettings, problem: Problem, done: int) -> None:
        """Send the first message."""
        self._steps = len(problem.stream)
        self._send("step", step=done, steps=self._steps)

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        """Send a message if the last one is old enough."""
        now = time.monotonic()
        if now - self._sent_at >= REPORT_SECONDS:
            self._sent_at = now
            self._send("step", step=report.step + 1, steps=self._steps)


# -- how the ranks of a run find each other: the environment variables that torchrun sets, too


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

    The ranks are all on one machine, or else each sees only its own GPUs.

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
    """Return the ranks that the environment makes this process one of, or None if it is the only process."""
    return join_world(os.environ.get(SPLIT, "tasks"))


# -- a process of this machine


def main() -> None:
    """Run the jobs that are read from standard input, and report on standard output, both in lines of JSON.

    At the end of input, because there are no more jobs or because the parent process has died, the worker saves the run
    it is making and exits.
    """
    faulthandler.enable()
    send = _take_over_stdout()
    orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    world = join_ranks()
    is_first = world is None or world.is_first
    send("ready")
    while (order := orders.get()) is not None:
        ended = attempt(RunSettings.model_validate(order["settings"]), Path(order["out"]), send, world)
        if is_report(ended, is_first):
            send(**ended)
        if is_first and ended["event"] == "interrupted":
            sys.exit(0)


def _take_over_stdout() -> Send:
    """Return a function that writes messages to standard output; all other output goes to standard error."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(event: str, **values: Any) -> None:
        with suppress(OSError):  # the parent has died: the end of input stops the run
            channel.write(json.dumps({"event": event, **values}) + "\n")
            channel.flush()

    return send


def _read_orders(orders: "SimpleQueue[dict[str, Any] | None]") -> None:
    try:
        for line in sys.stdin:
            orders.put(json.loads(line))
    finally:
        orders.put(None)  # for a run that has made its last step and no longer reacts to the signal
        signal.raise_signal(signal.SIGTERM)  # a run in progress saves itself; without one this ends the process


# -- a task of a Ray cluster


@dataclass(frozen=True)
class Order:
    """A run to make on a node.

    Attributes:
        number: tells the messages of this run from messages of other runs.
        settings: the settings of the run, as plain data.
        record: the settings as the folder of the run records them.
        out: the folder of the run.
        marker: the name of a file in the folder, by which a node knows that it shares the folder.
        sources: the files that the settings name, for nodes that do not have them.
        ranks: the number of processes that make the run together.
        split: what the processes split.
    """

    number: int
    settings: Mapping[str, Any]
    record: Mapping[str, Any]
    out: str
    marker: str
    sources: Mapping[str, bytes]
    ranks: int = 1
    split: str = "tasks"


def make_run(order: Order, queue: Any, rank: int = 0, endpoint: Endpoint | None = None) -> dict[str, Any]:
    """Make the run on this node, put its steps into the queue, and return the message of how it ended.

    Where the node does not share the run's folder, the run starts from the beginning in a temporary folder, and the
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
    world = None
    if endpoint is not None:
        # Ray shows each rank its own GPUs, as if it were alone on its machine
        os.environ |= rank_environment(rank, order.ranks, endpoint, split=order.split, on_this_machine=False)
        try:
            world = join_ranks()
        except SpclError as error:
            return {**failure(str(error)), "node": node}
    with nullcontext(order.out) if is_shared else tempfile.TemporaryDirectory(prefix="spcl-run-") as out:
        ended = attempt(settings, Path(out), send, world)
        if rank == 0 and ended["event"] == "done" and (settings != given or not is_shared):
            write_json(RunFolder(Path(out)).settings, order.record)
        if ended["event"] == "done" and not is_shared:
            ended["files"] = _read_files(Path(out))
    if ended["event"] == "done":
        leave_world()
    return {**ended, "node": node}


def find_endpoint() -> Endpoint:
    """Return where ranks find the first rank, which will run on this node."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address()), free_port()


def _node_name() -> str:
    """Return the name that this node was given in the cluster, or else its host name."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    named = node["NodeName"] != node["NodeManagerAddress"]
    return str(node["NodeName"] if named else node["NodeManagerHostname"])


# -- files that travel between machines: plug-ins and protocols to a node, the files of a complete run back


def source_files(settings: RunSettings) -> dict[str, bytes]:
    """Return the contents of the Python files and of the protocol that the settings name, by path."""
    names = [plugin.name for plugin in settings.plugins if plugin.name.endswith(".py")]
    names += [settings.protocol] if settings.protocol is not None else []
    return {name: Path(name).read_bytes() for name in names}


def with_local_sources(settings: RunSettings, sources: Mapping[str, bytes]) -> RunSettings:
    """Return the settings with copies of the :func:`source_files` that differ or are missing on this machine."""
    copies = {name: str(_copy(name, content)) for name, content in sources.items() if not _is_here(name, content)}
    plugins = tuple(
        plugin.model_copy(update={"name": copies.get(plugin.name, plugin.name)}) for plugin in settings.plugins
    )
    protocol = copies.get(settings.protocol or "", settings.protocol)
    return settings.model_copy(update={"plugins": plugins, "protocol": protocol})


def _is_here(name: str, content: bytes) -> bool:
    path = Path(name)
    return path.is_file() and path.read_bytes() == content


def _copy(name: str, content: bytes) -> Path:
    """Write a copy once per process, since a plug-in is imported once per path."""
    path = Path(_copies().name) / hashlib.sha256(content).hexdigest() / Path(name).name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return path


@cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="spcl-sources-")


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the visible files below a folder by relative path."""
    paths = (path for path in folder.rglob("[!.]*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(out: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a complete run into its folder, the result last, unless the folder has a result already.

    Raises:
        FolderInUseError: if another process makes the same run there.
    """
    folder = RunFolder(out)
    with folder.locked(), user_errors(out):
        if folder.read_result() is None:
            for name in sorted(files, key=lambda name: name == folder.result.name):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(out / name) as file:
                    file.write(files[name])
