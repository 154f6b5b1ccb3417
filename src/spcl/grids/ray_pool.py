"""A pool of runs on a Ray cluster: every run is a task, which the cluster places."""

import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any, Self

from spcl.distributed.mesh import mesh_shape
from spcl.errors import SpclError
from spcl.files import user_errors
from spcl.grids.base import Message, failure
from spcl.grids.cluster import connected, import_ray
from spcl.grids.plan import Job
from spcl.grids.ray_run import Needs, RayRun
from spcl.grids.ray_worker import BEGUN, Order
from spcl.grids.transfer import source_files, write_files
from spcl.grids.worker import is_report
from spcl.runs import FolderInUseError

__all__ = ["RayPool"]

MARKER = ".grid-"
SAVE_SECONDS = 60.0
"""How long ranks may take to save their run: they wait for each other, and one of them may have died."""

LAST_STEPS = 1000
"""The most messages about steps that are read at once."""


class RayPool:
    """Runs on a Ray cluster, which may have nodes that come and go.

    A run keeps ``threads`` CPUs and ``gpus_per_run`` GPUs for itself, on every node the same. Nodes that share the
    folder of a run resume it from its last checkpoint; others start from the beginning and send its files when it is
    complete. Leaving the ``with`` block lets the runs save themselves and waits for them; Ctrl-C meanwhile kills them.

    With several ``processes_per_run``, these make each run together, as the ranks that ``torchrun`` would start, each
    with so many CPUs and GPUs of its own. They start at the same time, on one node if it has room for all of them, else
    on several.

    Args:
        address: ``host:port`` of the cluster; without it that of ``$RAY_ADDRESS``, one that runs on this machine, or a
            new one of this machine alone.
        gpus_per_run: GPUs of a run, or of each of its processes; ``0.25`` lets four runs share one.
        size: the most runs at once; as many as the cluster's CPUs and GPUs are enough for if not given.
        processes_per_run: how many processes make a run.
        split: what they split, see :class:`spcl.distributed.World`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        gpus_per_run: float = 0.0,
        size: int | None = None,
        processes_per_run: int = 1,
        split: str = "tasks",
    ) -> None:
        self._ray = import_ray()
        self._address, self._gpus, self._size = address, gpus_per_run, size
        self._processes, self._split = processes_per_run, split
        mesh_shape(split, processes_per_run)  # which raises an error if they do not fit
        if processes_per_run > 1 and gpus_per_run != int(gpus_per_run):
            raise SpclError(
                f"{processes_per_run} processes cannot share a GPU, but each has {gpus_per_run:g} of one; give each a "
                f"whole GPU, or make runs of one process"
            )
        self._runs: dict[int, RayRun] = {}
        self._messages: deque[Message] = deque()
        self._numbers = count()
        self._marker = f"{MARKER}{secrets.token_hex(4)}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(connected(self._address))
            self._queue = self._start_queue()
            stack.callback(self._queue.shutdown)
            self._connection = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._connection:
            self.close()

    def _start_queue(self) -> Any:
        """Start the queue of messages, on the node of this process, with which it may end."""
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})

    def has_room(self) -> bool:
        """Return whether another job can start now."""
        if self._size is not None:
            return len(self._runs) < self._size
        used: Counter[str] = Counter()
        for run in self._runs.values():
            used.update(run.needs.total)
        there = self._ray.cluster_resources()
        return all(amount < there.get(name, 0) for name, amount in used.items())

    def start(self, job: Job) -> None:
        """Submit the job to the cluster.

        Raises:
            SpclError: if the run would not be the same on every node, or no node is large enough for the first one.
        """
        _check_same_everywhere(job, self._gpus)
        needs, number = Needs(self._processes, float(job.settings.threads or 1), self._gpus), next(self._numbers)
        if number == 0:
            self._check_nodes(needs)
        try:
            order = self._order(job, number)
        except SpclError as error:
            self._messages.append(Message.of(job, failure(str(error), user_error=True)))
            return
        self._runs[number] = RayRun.submit(job, order, needs, self._queue)

    def _order(self, job: Job, number: int) -> Order:
        out = job.out.absolute()
        with user_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / self._marker).touch()
            sources = source_files(job.settings)
        settings = job.settings.model_dump(mode="json")
        return Order(number, settings, str(out), self._marker, sources, self._processes, self._split)

    def _check_nodes(self, needs: Needs) -> None:
        """Raise an error if a run does not fit the cluster: Ray would wait for other nodes for ever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not needs.fit(nodes):
            found = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
            run = "a run" if needs.processes == 1 else f"each of the {needs.processes} processes of a run"
            raise SpclError(
                f"{run} needs {needs.cpus:g} CPUs and {needs.gpus:g} GPUs, for which the cluster has no room (its "
                f"nodes have {found}); plan it with fewer threads, processes or GPUs"
            )

    def next_message(self, timeout: float) -> Message | None:
        """Return the next message about a job, or None if there is none within ``timeout`` seconds."""
        if not self._messages:
            self._collect(timeout)
        return self._messages.popleft() if self._messages else None

    def _collect(self, timeout: float) -> None:
        if not self._runs:
            time.sleep(timeout)
            return
        ended, _ = self._ray.wait([task for run in self._runs.values() for task in run.waiting], timeout=timeout)
        if ended:
            run = next(run for run in self._runs.values() if ended[0] in run.waiting)
            if message := self._end(run, run.tasks.index(ended[0])):
                self._messages.append(message)
            return
        for number, rank, sent in self._queue.get_nowait_batch(min(LAST_STEPS, self._queue.qsize())):
            if number in self._runs:
                self._receive(self._runs[number], rank, sent)

    def _receive(self, run: RayRun, rank: int, sent: dict[str, Any]) -> None:
        run.nodes[rank] = sent["node"]
        if sent["event"] != BEGUN:
            run.is_training = True
            self._messages.append(Message.of(run.job, sent))

    def _end(self, run: RayRun, rank: int) -> Message | None:
        """Return how a run ended, if the end of this rank says it."""
        run.waiting.remove(run.tasks[rank])
        message = self._message(run, rank)
        if message is None and run.waiting:
            return None
        del self._runs[run.number]
        _remove_markers(run.job, self._marker)
        message = message or Message.of(run.job, failure("its processes ended without a result"))
        run.end(is_well=message.event in ("done", "busy"))
        return message

    def _message(self, run: RayRun, rank: int) -> Message | None:
        """Return what the task of a rank returned, or why there is no result; None if others say how the run ended."""
        errors, node = self._ray.exceptions, run.nodes.get(rank)
        try:
            sent = self._ray.get(run.tasks[rank])
            return self._ended(run, **sent) if is_report(sent, rank == 0) else None
        except (errors.NodeDiedError, errors.ObjectLostError):
            return Message(run.job, "lost", {"reason": f"the node {node or 'of the run'} was lost"})
        except errors.RayError as error:
            crashed = isinstance(error, errors.WorkerCrashedError | errors.OutOfMemoryError)
            which = f"the worker process{f' of rank {rank}' if len(run.tasks) > 1 else ''}"
            reason = f"{which} died (often: out of memory)" if crashed else str(error).splitlines()[-1]
            sent = failure(_on(node, reason), str(error), out_of_memory=isinstance(error, errors.OutOfMemoryError))
            return Message.of(run.job, sent)

    def _ended(self, run: RayRun, node: str, files: Mapping[str, bytes] | None = None, **sent: Any) -> Message:
        job = run.job
        if files is not None:
            try:
                write_files(job.out, files)
            except FolderInUseError:
                return Message(job, "busy")
            except SpclError as error:
                sent = failure(str(error), user_error=True)
        if sent["event"] == "interrupted":  # by its node, which is drained or shut down
            where = f"the node {node}" if len(run.tasks) == 1 else "one of its nodes"
            return Message(job, "lost", {"reason": f"{where} stopped it"})
        if sent["event"] == "done":
            _remove_markers(job, f"{MARKER}*")  # those of grids that were killed, too
        for name in sent.keys() & {"summary", "reason"}:
            sent[name] = _on(node, sent[name])
        return Message.of(job, sent)

    def close(self) -> None:
        """Let every run save itself, and wait for it."""
        runs = list(self._runs.values())
        try:
            for run in runs:
                run.stop()
            first = {run.tasks[0]: run for run in runs if run.tasks[0] in run.waiting}  # those that write
            if first:
                seconds = None if self._processes == 1 else SAVE_SECONDS
                ended, _ = self._ray.wait(list(first), num_returns=len(first), timeout=seconds)
                for task in ended:
                    self._end(first[task], 0)
        finally:
            for run in self._runs.values():
                run.kill()
            self._runs.clear()


def _check_same_everywhere(job: Job, gpus: float) -> None:
    """Raise an error if a setting would leave it to the node how the run is made."""
    if job.settings.threads is None:
        raise SpclError("threads = None differs from node to node; plan the runs with a number, such as threads = 1")
    if not gpus and job.settings.device != "cpu":
        raise SpclError(
            f"device = {job.settings.device} differs from node to node for runs without a GPU of their own; plan them "
            f"with device = cpu, or give every run a GPU or a part of one"
        )


def _remove_markers(job: Job, pattern: str) -> None:
    with suppress(OSError):
        for path in job.out.glob(pattern):
            path.unlink(missing_ok=True)


def _on(node: str | None, text: str) -> str:
    return text if node is None else f"{text} (on {node})"
