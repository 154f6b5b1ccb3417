"""A pool of long-lived worker processes of this machine that run jobs; a process that dies is replaced."""

import signal
from queue import Empty, SimpleQueue
from typing import Self

import torch

from spcl.distributed.mesh import mesh_shape
from spcl.errors import SpclError
from spcl.grids.base import Message, failure
from spcl.grids.plan import Job
from spcl.grids.processes import Inbox, Worker

__all__ = ["WorkerPool", "threads_per_job"]

MAX_FAILED_STARTS = 3


def threads_per_job(jobs: int) -> int:
    """Return the CPU threads of each of ``jobs`` parallel runs; more threads than cores would slow down all."""
    return max(1, torch.get_num_threads() // jobs)


class WorkerPool:
    """Up to ``size`` workers, each making one run at a time; a worker that dies fails only its own run.

    A worker is a process, or ``processes_per_run`` of them that make the run together, as the ranks that ``torchrun``
    would start: when one of them dies, the others are ended, and the run has failed. What they ``split`` is said as
    :class:`spcl.distributed.World` has it.

    Leaving the ``with`` block lets the workers save their runs and waits for them; Ctrl-C meanwhile kills them.
    """

    def __init__(self, size: int, processes_per_run: int = 1, split: str = "tasks") -> None:
        mesh_shape(split, processes_per_run)  # which raises an error if they do not fit
        self._size = size
        self._processes = processes_per_run
        self._split = split
        self._workers: list[Worker] = []
        self._inbox: Inbox = SimpleQueue()
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
            worker = Worker(self._inbox, self._processes, threads_per_job(self._size * self._processes), self._split)
            self._workers.append(worker)
        worker.start(job)

    def next_message(self, timeout: float) -> Message | None:
        """Return the next message about a job, or None if there is none within ``timeout`` seconds."""
        try:
            worker, rank, values = self._inbox.get(timeout=timeout)
        except Empty:
            return None
        if worker not in self._workers:  # what the other ranks of a run that has failed say
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
            return Message.of(job, values)
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

    def _end(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def _handle_exit(self, worker: Worker, rank: int) -> Message | None:
        """Fail the job of a worker of which a process died, or start it again if that was before it was ready."""
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
        return Message.of(job, failure(reason, errors, out_of_memory=status == -signal.SIGKILL))
