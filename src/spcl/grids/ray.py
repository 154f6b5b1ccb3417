"""A pool of runs on a Ray cluster: every run is a task, which the cluster places."""

import os
import secrets
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, Self

from spcl._util.files import user_errors
from spcl._util.signals import handling
from spcl.engine.ranks.world import mesh_shape
from spcl.errors import SpclError, install_command
from spcl.grids.base import JobMessage, failure
from spcl.grids.plan import Job
from spcl.grids.worker import BEGUN, Order, find_endpoint, is_report, make_run, source_files, write_files
from spcl.runs import FolderInUseError
from spcl.runs.settings import portable_settings

MARKER = ".grid-"
SAVE_SECONDS = 60.0
"""How long ranks may take to save their run: they wait for each other, and one of them may have died."""
END_SECONDS = 5.0
"""How long the other ranks of a run that has ended well have to end."""
CONNECT_SECONDS = 5.0
LAST_STEPS = 1000
"""The most messages about steps that are read at once."""
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


class RayPool:
    """Runs on a Ray cluster, which may have nodes that come and go.

    Each run reserves ``threads`` CPUs and ``gpus_per_run`` GPUs, on every node the same. Nodes that share the folder of
    a run resume it from its last checkpoint; others start from the beginning and send the run's files when it is
    complete. Leaving the ``with`` block lets the runs save themselves and waits for them; Ctrl-C meanwhile kills them.

    With several ``processes_per_run``, these make each run together, as the ranks that ``torchrun`` would start, and
    each process reserves ``threads`` CPUs and ``gpus_per_run`` GPUs. They start at the same time, on one node if it has
    room for all of them, else on several.

    Args:
        address: ``host:port`` of the cluster; by default the cluster at ``$RAY_ADDRESS``, one that runs on
            this machine, or a new one of this machine alone.
        gpus_per_run: GPUs of a run, or of each of its processes; ``0.25`` lets four runs share one.
        size: the most runs at once; by default as many as the cluster has CPUs and GPUs for.
        processes_per_run: the number of processes that make a run.
        split: what the processes split, see :class:`spcl.distributed.World`.
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
        mesh_shape(split, processes_per_run)  # raises an error if they do not fit
        if processes_per_run > 1 and gpus_per_run != int(gpus_per_run):
            raise SpclError(
                f"{processes_per_run} processes cannot share a GPU, but each has {gpus_per_run:g} of one; give each a "
                f"whole GPU, or make runs of one process"
            )
        self._runs: dict[int, _RayRun] = {}
        self._messages: deque[JobMessage] = deque()
        self._numbers = count()
        self._marker = f"{MARKER}{secrets.token_hex(4)}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_connected(self._address))
            self._queue = self._start_queue()
            stack.callback(self._queue.shutdown)
            self._connection = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._connection:
            self.close()

    def _start_queue(self) -> Any:
        """Start the queue of messages on the node of this process, since the queue may end with this process."""
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
            self._messages.append(JobMessage.of(job, failure(str(error), user_error=True)))
            return
        self._runs[number] = _RayRun.submit(job, order, needs, self._queue)

    def _order(self, job: Job, number: int) -> Order:
        out = job.out.absolute()
        with user_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / self._marker).touch()
            sources = source_files(job.settings)
        settings, record = job.settings.model_dump(mode="json"), portable_settings(job.settings, out)
        return Order(number, settings, record, str(out), self._marker, sources, self._processes, self._split)

    def _check_nodes(self, needs: "Needs") -> None:
        """Raise an error if a run does not fit the cluster: Ray would wait for other nodes for ever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not needs.fit(nodes):
            found = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
            run = "a run" if needs.processes == 1 else f"each of the {needs.processes} processes of a run"
            raise SpclError(
                f"{run} needs {needs.cpus:g} CPUs and {needs.gpus:g} GPUs, for which the cluster has no room (its "
                f"nodes have {found}); plan it with fewer threads, processes or GPUs"
            )

    def next_message(self, timeout: float) -> JobMessage | None:
        """Return the next message about a job, or None if there is none within ``timeout`` seconds."""
        if not self._messages:
            self._collect(timeout)
        return self._messages.popleft() if self._messages else None

    def _collect(self, timeout: float) -> None:
        """Wait for messages: the end of a task, or else the steps that runs have sent."""
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
            if number not in self._runs:
                continue
            run = self._runs[number]
            run.nodes[rank] = sent["node"]
            if sent["event"] != BEGUN:
                run.is_training = True
                self._messages.append(JobMessage.of(run.job, sent))

    def _end(self, run: "_RayRun", rank: int) -> JobMessage | None:
        """Return how a run ended, or None if the end of this rank does not say it."""
        run.waiting.remove(run.tasks[rank])
        message = self._result(run, rank)
        if message is None and run.waiting:
            return None
        del self._runs[run.number]
        _remove_markers(run.job, self._marker)
        message = message or JobMessage.of(run.job, failure("its processes ended without a result"))
        run.end(is_well=message.event in ("done", "busy"))
        return message

    def _result(self, run: "_RayRun", rank: int) -> JobMessage | None:
        """Return the message of a rank that has ended, or None if other ranks say how the run ended."""
        errors, node = self._ray.exceptions, run.nodes.get(rank)
        try:
            sent = self._ray.get(run.tasks[rank])
        except (errors.NodeDiedError, errors.ObjectLostError):
            return JobMessage(run.job, "lost", {"reason": f"the node {node or 'of the run'} was lost"})
        except errors.RayError as error:
            crashed = isinstance(error, errors.WorkerCrashedError | errors.OutOfMemoryError)
            which = f"the worker process{f' of rank {rank}' if len(run.tasks) > 1 else ''}"
            reason = f"{which} died (often: out of memory)" if crashed else str(error).splitlines()[-1]
            sent = failure(_on(node, reason), str(error), out_of_memory=isinstance(error, errors.OutOfMemoryError))
            return JobMessage.of(run.job, sent)
        return self._ended(run, **sent) if is_report(sent, rank == 0) else None

    def _ended(self, run: "_RayRun", node: str, files: Mapping[str, bytes] | None = None, **sent: Any) -> JobMessage:
        """Write the files that came with the message of a complete run; return the message, with its node."""
        job = run.job
        if files is not None:
            try:
                write_files(job.out, files)
            except FolderInUseError:
                return JobMessage(job, "busy")
            except SpclError as error:
                sent = failure(str(error), user_error=True)
        if sent["event"] == "interrupted":  # by its node, which is drained or shut down
            where = f"the node {node}" if len(run.tasks) == 1 else "one of its nodes"
            return JobMessage(job, "lost", {"reason": f"{where} stopped it"})
        if sent["event"] == "done":
            _remove_markers(job, f"{MARKER}*")  # also the markers of grids that were killed
        for name in sent.keys() & {"summary", "reason"}:
            sent[name] = _on(node, sent[name])
        return JobMessage.of(job, sent)

    def close(self) -> None:
        """Let every run save itself, and wait for it."""
        runs = list(self._runs.values())
        try:
            for run in runs:
                run.stop()
            writers = {run.tasks[0]: run for run in runs if run.tasks[0] in run.waiting}
            if writers:
                seconds = None if self._processes == 1 else SAVE_SECONDS
                ended, _ = self._ray.wait(list(writers), num_returns=len(writers), timeout=seconds)
                for task in ended:
                    self._end(writers[task], 0)
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


# -- a run on the cluster: one task, or the tasks of its ranks in a placement group


@dataclass(frozen=True)
class Needs:
    """What the cluster reserves for a run: a number of processes, with the CPUs and GPUs of each."""

    processes: int
    cpus: float
    gpus: float

    @property
    def each(self) -> dict[str, float]:
        """The resources of each process, by Ray's names."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    @property
    def total(self) -> dict[str, float]:
        """The resources of all processes."""
        return {name: self.processes * amount for name, amount in self.each.items()}

    def fit(self, nodes: list[Mapping[str, float]]) -> bool:
        """Return whether nodes with these resources have room for all processes, if nothing else runs there.

        >>> Needs(processes=2, cpus=2.0, gpus=0.0).fit([{"CPU": 3.0}, {"CPU": 3.0}])
        True
        """
        places = (min(node.get(name, 0.0) // amount for name, amount in self.each.items()) for node in nodes)
        return sum(places) >= self.processes


@dataclass
class _RayRun:
    """A run that the cluster makes or will make.

    Attributes:
        job: the run.
        number: tells the messages of this run from messages of other runs.
        needs: what the cluster reserves for the run.
        tasks: Ray's references to its tasks, the first rank first.
        group: the placement group of several ranks.
        waiting: the tasks whose end has not been seen.
        nodes: the names of the nodes of the ranks that have begun.
        is_training: whether the run has made or resumed a step, so that there is something to save.
    """

    job: Job
    number: int
    needs: Needs
    tasks: list[Any]
    group: Any = None
    nodes: dict[int, str] = field(default_factory=dict)
    is_training: bool = False

    def __post_init__(self) -> None:
        self.waiting = list(self.tasks)

    @classmethod
    def submit(cls, job: Job, order: Order, needs: Needs, queue: Any) -> Self:
        """Submit the tasks of a run, which wait until the cluster has room for all of them at once."""
        task, options = _task(needs.gpus, needs.processes > 1), {"num_cpus": needs.cpus, "name": job.name}
        if needs.processes == 1:
            return cls(job, order.number, needs, [task.options(**options).remote(order, queue)])
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([needs.each] * needs.processes)
        places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(needs.processes)]  # by its bundle
        endpoint = _finder().options(scheduling_strategy=places[0]).remote()
        ranks = [
            task.options(**options, scheduling_strategy=place).remote(order, queue, rank, endpoint)
            for rank, place in enumerate(places)
        ]
        return cls(job, order.number, needs, ranks, group)

    def stop(self) -> None:
        """Let the run save itself; ranks of a run that has not begun would wait for each other, and are killed."""
        if self.group is not None and not self.is_training:
            self._remove_group()
        else:
            for task in self.tasks:
                import_ray().cancel(task)

    def end(self, is_well: bool) -> None:
        """Free what the cluster reserves for several ranks; ranks that still run are killed, after a bad end at once.

        A task alone has ended, and reserves nothing.
        """
        if self.group is not None:
            if is_well:
                import_ray().wait(self.tasks, num_returns=len(self.tasks), timeout=END_SECONDS)
            self._remove_group()

    def kill(self) -> None:
        """End all processes at once."""
        for task in self.tasks:
            import_ray().cancel(task, force=True)
        self.end(is_well=False)

    def _remove_group(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


@cache
def _task(gpus: float, is_rank: bool) -> Any:
    """Return the task of Ray; processes that cannot change to another GPU, or to other ranks, make one run only."""
    return import_ray().remote(num_gpus=gpus, max_retries=0, max_calls=1 if gpus or is_rank else 0)(make_run)


@cache
def _finder() -> Any:
    return import_ray().remote(num_cpus=0)(find_endpoint)


# -- connecting to a cluster


def import_ray() -> Any:
    """Import Ray, which is optional."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # or it prints its nodes' warnings into our progress
    try:
        import ray
    except ImportError as error:
        raise SpclError(f"Ray is not installed; run: {install_command('ray')}") from error
    return ray


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Connect this process to the cluster at ``address``, and disconnect it when the block ends.

    Without an address, connect to the cluster of ``$RAY_ADDRESS`` or one that runs on this machine, or else start one
    of this machine alone, which ends with the block. A connection that the program has already is used and kept.

    Raises:
        SpclError: if there is no cluster at this address, or it refuses the connection.
    """
    ray = import_ray()
    if address not in (None, "auto"):
        _check_address(str(address))
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined):
            raise SpclError(
                f"this process has joined the Ray cluster at {joined}, not {address}; leave the address out, or call "
                f"ray.shutdown() first"
            )
        yield
        return
    with handling([signal.SIGTERM], signal.getsignal(signal.SIGTERM)):  # which ray.init replaces
        _connect(ray, address)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address or "auto", **QUIET)
    except ConnectionError as error:
        if address == "auto":
            raise SpclError("no Ray cluster runs on this machine; start one with: ray start --head") from error
        if address is not None:
            raise SpclError(
                f"no Ray cluster at {address} accepts this process; check the address, and that RAY_AUTH_MODE and "
                f"the token are the cluster's"
            ) from error
        with _token_of_its_own():
            ray.init(address="local", include_dashboard=False, **QUIET)
    except (ray.exceptions.RayError, RuntimeError) as error:  # no token, or another version of Ray or Python
        reason = str(error).strip().partition(". ")[0]
        raise SpclError(f"cannot join the Ray cluster at {address or 'auto'}: {reason}") from error


def _check_address(address: str) -> None:
    """Raise an error if nothing answers there, which Ray itself finds out only after two minutes, and then exits."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise SpclError(f"{address!r} is not the address of a Ray cluster; write host:port, for example head:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise SpclError(
            f"no Ray cluster answers at {address} ({error}); start one there with: ray start --head --port {port}"
        ) from error


@contextmanager
def _token_of_its_own() -> Iterator[None]:
    """Give a new cluster a token that only this process and its children know.

    Otherwise Ray writes one to the home directory, which clusters that are started later then ask for
    (ray-project/ray#64755).
    """
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
