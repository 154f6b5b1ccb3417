"""A pool of runs on a Ray cluster: every run is a task, which the cluster places."""

import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

from spcl.errors import SpclError
from spcl.files import user_errors
from spcl.grids.base import Message, failure
from spcl.grids.cluster import connected, import_ray
from spcl.grids.plan import Job
from spcl.grids.ray_worker import Order, make_run
from spcl.grids.transfer import source_files, write_files
from spcl.runs import FolderInUseError

__all__ = ["RayPool"]

MARKER = ".grid-"
LAST_STEPS = 1000
"""The most messages about steps that are read at once."""


@dataclass
class _Run:
    """A run that the cluster makes or will make: what it needs, and its node once it has begun."""

    job: Job
    number: int
    needs: Mapping[str, float]
    node: str | None = None


class RayPool:
    """Runs on a Ray cluster, which may have nodes that come and go.

    A run keeps ``threads`` CPUs and ``gpus_per_run`` GPUs for itself, on every node the same. Nodes that share the
    folder of a run resume it from its last checkpoint; others start from the beginning and send its files when it is
    complete. Leaving the ``with`` block lets the runs save themselves and waits for them; Ctrl-C meanwhile kills them.

    Args:
        address: ``host:port`` of the cluster; without it that of ``$RAY_ADDRESS``, one that runs on this machine, or a
            new one of this machine alone.
        gpus_per_run: GPUs of a run; ``0.25`` lets four runs share one.
        size: the most runs at once; as many as the cluster's CPUs and GPUs are enough for if not given.
    """

    def __init__(self, address: str | None = None, *, gpus_per_run: float = 0.0, size: int | None = None) -> None:
        self._ray = import_ray()
        self._address, self._gpus, self._size = address, gpus_per_run, size
        self._runs: dict[Any, _Run] = {}
        self._messages: deque[Message] = deque()
        self._numbers = count()
        self._marker = f"{MARKER}{secrets.token_hex(4)}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(connected(self._address))
            self._queue = self._start_queue()
            stack.callback(self._queue.shutdown)
            # A worker with a GPU makes one run, Ray's default: it could not change to another GPU.
            self._task = self._ray.remote(num_gpus=self._gpus, max_retries=0)(make_run)
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
            used.update(run.needs)
        there = self._ray.cluster_resources()
        return all(amount < there.get(name, 0) for name, amount in used.items())

    def start(self, job: Job) -> None:
        """Submit the job to the cluster.

        Raises:
            SpclError: if the run would not be the same on every node, or no node is large enough for the first one.
        """
        _check_same_everywhere(job, self._gpus)
        run = _Run(job, next(self._numbers), _needs(job, self._gpus))
        if run.number == 0:
            self._check_nodes(run)
        try:
            order = self._order(run)
        except SpclError as error:
            self._messages.append(Message.of(job, failure(str(error), user_error=True)))
            return
        task = self._task.options(num_cpus=run.needs["CPU"], name=job.name)
        self._runs[task.remote(order, self._queue)] = run

    def _order(self, run: _Run) -> Order:
        job = run.job
        out = job.out.absolute()
        with user_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / self._marker).touch()
            sources = source_files(job.settings)
        return Order(run.number, job.settings.model_dump(mode="json"), str(out), self._marker, sources)

    def _check_nodes(self, run: _Run) -> None:
        """Raise an error if the run fits no node: Ray would wait for one for ever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0.0) >= amount for name, amount in run.needs.items()) for node in nodes):
            found = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise SpclError(
                f"a run needs {run.needs['CPU']:g} CPUs and {self._gpus:g} GPUs, which no node of the cluster has "
                f"(they have {found}); plan it with fewer threads, or with a smaller part of a GPU"
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
        ended, _ = self._ray.wait(list(self._runs), timeout=timeout)
        if ended:
            self._messages.append(self._end(ended[0]))
            return
        by_number = {run.number: run for run in self._runs.values()}
        for number, sent in self._queue.get_nowait_batch(min(LAST_STEPS, self._queue.qsize())):
            if run := by_number.get(number):
                run.node = sent["node"]
                self._messages.append(Message.of(run.job, sent))

    def _end(self, reference: Any) -> Message:
        """Return how a run ended, that is, what its task returned or why there is no result."""
        run = self._runs.pop(reference)
        _remove_markers(run.job, self._marker)
        errors = self._ray.exceptions
        try:
            return self._ended(run.job, **self._ray.get(reference))
        except (errors.NodeDiedError, errors.ObjectLostError):
            return Message(run.job, "lost", {"reason": f"the node {run.node or 'of the run'} was lost"})
        except errors.RayError as error:
            crashed = isinstance(error, errors.WorkerCrashedError | errors.OutOfMemoryError)
            reason = "the worker process died (often: out of memory)" if crashed else str(error).splitlines()[-1]
            sent = failure(_on(run.node, reason), str(error), out_of_memory=isinstance(error, errors.OutOfMemoryError))
            return Message.of(run.job, sent)

    def _ended(self, job: Job, node: str, files: Mapping[str, bytes] | None = None, **sent: Any) -> Message:
        if files is not None:
            try:
                write_files(job.out, files)
            except FolderInUseError:
                return Message(job, "busy")
            except SpclError as error:
                sent = failure(str(error), user_error=True)
        if sent["event"] == "interrupted":  # by its node, which is drained or shut down
            return Message(job, "lost", {"reason": f"the node {node} stopped it"})
        if sent["event"] == "done":
            _remove_markers(job, f"{MARKER}*")  # those of grids that were killed, too
        for name in sent.keys() & {"summary", "reason"}:
            sent[name] = _on(node, sent[name])
        return Message.of(job, sent)

    def close(self) -> None:
        """Let every run save itself, and wait for it."""
        references = list(self._runs)
        try:
            for reference in references:
                self._ray.cancel(reference)
            if references:
                self._ray.wait(references, num_returns=len(references))
            for reference in references:
                self._end(reference)
        finally:
            for reference in self._runs:
                self._ray.cancel(reference, force=True)
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


def _needs(job: Job, gpus: float) -> dict[str, float]:
    return {"CPU": float(job.settings.threads or 1)} | ({"GPU": gpus} if gpus else {})


def _on(node: str | None, text: str) -> str:
    return text if node is None else f"{text} (on {node})"
