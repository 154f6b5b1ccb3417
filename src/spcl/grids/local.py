"""A pool of long-lived worker processes of this machine that run jobs; a process that dies is replaced."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

import torch

from spcl.engine.ranks.world import mesh_shape
from spcl.errors import SpclError
from spcl.grids.base import JobMessage, failure
from spcl.grids.plan import Job
from spcl.grids.worker import free_port, rank_environment

MAX_FAILED_STARTS = 3
STDERR_BYTES = 4000
PROGRAM = "from spcl.grids.worker import main; main()"


def threads_per_job(jobs: int) -> int:
    """Return the CPU threads of each of ``jobs`` parallel runs; more threads than cores would slow down all."""
    return max(1, torch.get_num_threads() // jobs)


class WorkerPool:
    """Up to ``size`` workers, each making one run at a time; a worker that dies fails only its own run.

    A worker is one process, or ``processes_per_run`` processes that make a run together, as the ranks that ``torchrun``
    would start: when one of them dies, the others are ended, and the run has failed. :class:`spcl.distributed.World`
    says what they can ``split``.

    Leaving the ``with`` block lets the workers save their runs and waits for them; Ctrl-C meanwhile kills them.
    """

    def __init__(self, size: int, processes_per_run: int = 1, split: str = "tasks") -> None:
        mesh_shape(split, processes_per_run)  # raises an error if they do not fit
        self._size = size
        self._processes = processes_per_run
        self._split = split
        self._workers: list[_Worker] = []
        self._inbox: _Inbox = SimpleQueue()
        self._failed_starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_room(self) -> bool:
        """Return whether another job can start now."""
        return len(self._workers) < self._size or any(worker.job is None for worker in self._workers)

    def start(self, job: Job) -> None:
        """Give the job to an idle worker, or to a new one."""
        worker = next((worker for worker in self._workers if worker.job is None), None)
        if worker is None:
            threads = threads_per_job(self._size * self._processes)
            worker = _Worker(self._inbox, self._processes, threads, self._split)
            self._workers.append(worker)
        worker.start(job)

    def next_message(self, timeout: float) -> JobMessage | None:
        """Return the next message about a job, or None if there is none within ``timeout`` seconds."""
        try:
            worker, rank, values = self._inbox.get(timeout=timeout)
        except Empty:
            return None
        if worker not in self._workers:  # a late message of another rank of a failed run
            return None
        job, event = worker.job, values["event"]
        if event == "ready":
            worker.ready, self._failed_starts = True, 0
        elif event == "exited":
            return self._handle_exit(worker, rank)
        elif job is not None:
            if event != "step":
                worker.job = None
            if event == "interrupted" or (worker.is_several and event == "failed"):
                self._end(worker)  # it exits anyway, or its other ranks wait for the one that failed
            return JobMessage.of(job, values)
        return None

    def close(self) -> None:
        """Let every worker save its run and exit."""
        try:
            for worker in self._workers:
                worker.close_input()
            for worker in self._workers:
                worker.wait()
        finally:
            for worker in list(self._workers):
                self._end(worker)

    def _end(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        worker.end()

    def _handle_exit(self, worker: "_Worker", rank: int) -> JobMessage | None:
        """Fail the job of a worker after one of its processes died, or start the job again if none was ready yet."""
        status = worker.wait(rank)
        self._end(worker)
        job = worker.job
        reason, errors = worker.describe_exit(rank)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise SpclError(f"worker processes do not start: {reason}\n{errors}")
            if job is not None:
                self.start(job)
            return None
        if job is None:
            return None
        return JobMessage.of(job, failure(reason, errors, out_of_memory=status == -signal.SIGKILL))


class _Worker:
    """The processes that make one run at a time, as its ranks if there are several.

    Args:
        inbox: receives what the processes send, and ``exited`` when one has ended.
        processes: the number of processes.
        threads: CPU threads of each process.
        split: what the processes split, see :class:`spcl.distributed.World`.

    Attributes:
        job: the run that they make now.
        ready: whether they have started.
    """

    def __init__(self, inbox: "_Inbox", processes: int, threads: int, split: str) -> None:
        self.job: Job | None = None
        self.ready = False
        endpoint = ("127.0.0.1", free_port() if processes > 1 else 0)
        self._ranks = []
        for rank in range(processes):
            ranks = rank_environment(rank, processes, endpoint, split=split)
            environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **ranks}
            self._ranks.append(_Process(environment, partial(self._forward, inbox, rank)))

    def _forward(self, inbox: "_Inbox", rank: int, values: dict[str, Any]) -> None:
        inbox.put(_Sent(self, rank, values))

    @property
    def is_several(self) -> bool:
        """Whether runs have several processes."""
        return len(self._ranks) > 1

    def start(self, job: Job) -> None:
        """Send the job to the processes."""
        self.job = job
        order = {"settings": job.settings.model_dump(mode="json"), "out": str(job.out)}
        for process in self._ranks:
            process.write(json.dumps(order) + "\n")

    def close_input(self) -> None:
        """Signal the end of jobs; the processes save their run and exit."""
        for process in self._ranks:
            process.close_input()

    def wait(self, rank: int = 0) -> int:
        """Wait for a process to exit, and return its status; rank 0 saves the run."""
        return self._ranks[rank].wait()

    def kill(self) -> None:
        """Kill the processes that have not exited."""
        for process in self._ranks:
            process.kill()

    def end(self) -> None:
        """Kill the processes that have not exited, and wait for all."""
        self.kill()
        for process in self._ranks:
            process.end()

    def describe_exit(self, rank: int) -> tuple[str, str]:
        """Return how a process ended, and the end of its standard error; call :meth:`end` before."""
        process = self._ranks[rank]
        which = f"the worker process of rank {rank}" if self.is_several else "the worker process"
        return _describe_exit(which, process.wait()), process.errors


class _Sent(NamedTuple):
    """A message from a process of a worker: its values, with the event among them."""

    worker: _Worker
    rank: int
    values: dict[str, Any]


_Inbox = SimpleQueue[_Sent]


class _Process:
    """One process, and the thread that reads its messages."""

    def __init__(self, environment: dict[str, str], receive: Callable[[dict[str, Any]], None]) -> None:
        self.errors = ""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends its workers by closing their input
        )
        self._reader = threading.Thread(target=self._read_messages, args=(receive,), daemon=True)
        self._reader.start()

    def write(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # a process that has exited is reported by the reader
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def close_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Wait for the process to exit, and keep the end of its standard error."""
        self.close_input()
        self.wait()
        self._reader.join()
        with self._stderr as file:
            file.seek(0)
            self.errors = file.read()[-STDERR_BYTES:].decode(errors="replace").strip()

    def _read_messages(self, receive: Callable[[dict[str, Any]], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # a killed process may leave half a line
                    receive(json.loads(line))
        receive({"event": "exited"})


def _describe_exit(which: str, status: int) -> str:
    """Describe the exit status of a process.

    >>> _describe_exit("the worker process", -9)
    'the worker process was ended by SIGKILL (often: out of memory)'
    """
    if status >= 0:
        return f"{which} ended with status {status}"
    name = signal.Signals(-status).name
    return f"{which} was ended by {name}{' (often: out of memory)' if name == 'SIGKILL' else ''}"
