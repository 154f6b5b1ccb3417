"""A pool of long-lived worker processes of this machine that run jobs; a process that dies is replaced."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Self

import torch

from spcl.errors import SpclError
from spcl.grids.base import Message, failure
from spcl.grids.plan import Job

__all__ = ["WorkerPool", "threads_per_job"]

MAX_FAILED_STARTS = 3
STDERR_BYTES = 4000
PROGRAM = "from spcl.grids.worker import main; main()"


def threads_per_job(jobs: int) -> int:
    """Return the CPU threads of each of ``jobs`` parallel runs; more threads than cores would slow down all."""
    return max(1, torch.get_num_threads() // jobs)


class WorkerPool:
    """Up to ``size`` processes, each running one job at a time; a process that dies fails only its own job.

    Leaving the ``with`` block lets the processes save their runs and waits for them; Ctrl-C meanwhile kills them.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[_Worker] = []
        self._inbox: SimpleQueue[tuple[_Worker, dict[str, Any]]] = SimpleQueue()
        self._failed_starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_room(self) -> bool:
        """Return whether another job can start now."""
        return len(self._workers) < self._size or any(worker.job is None for worker in self._workers)

    def start(self, job: Job) -> None:
        """Start the job in an idle process, or in a new one."""
        worker = next((worker for worker in self._workers if worker.job is None), None)
        if worker is None:
            worker = _Worker(self._inbox, threads_per_job(self._size))
            self._workers.append(worker)
        worker.start(job)

    def next_message(self, timeout: float) -> Message | None:
        """Return the next message about a job, or None if there is none within ``timeout`` seconds."""
        try:
            worker, values = self._inbox.get(timeout=timeout)
        except Empty:
            return None
        job, event = worker.job, values["event"]
        if event == "ready":
            worker.ready, self._failed_starts = True, 0
        elif event == "exited":
            return self._handle_exit(worker)
        elif job is not None:
            if event != "step":
                worker.job = None
            return Message.of(job, values)
        return None

    def close(self) -> None:
        """Let every process save its run and exit."""
        try:
            for worker in self._workers:
                worker.close_input()
            for worker in self._workers:
                worker.process.wait()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.wait()
            self._workers.clear()

    def _handle_exit(self, worker: "_Worker") -> Message | None:
        """Fail the job of a process that died, or start it again if the process died before it was ready."""
        self._workers.remove(worker)
        reason, errors = worker.wait()
        job = worker.job
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise SpclError(f"worker processes do not start: {reason}\n{errors}")
            if job is not None:
                self.start(job)
            return None
        if job is None:
            return None
        killed = worker.process.returncode == -signal.SIGKILL
        return Message.of(job, failure(reason, errors, out_of_memory=killed))


class _Worker:
    """One process, the thread that reads its messages, and its job."""

    def __init__(self, inbox: "SimpleQueue[tuple[_Worker, dict[str, Any]]]", threads: int) -> None:
        self.job: Job | None = None
        self.ready = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by wait()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends its workers by closing their input
        )
        self._reader = threading.Thread(target=self._read_messages, args=(inbox,), daemon=True)
        self._reader.start()

    def start(self, job: Job) -> None:
        """Send the job to the process."""
        assert self.process.stdin is not None
        self.job = job
        order = {"settings": job.settings.model_dump(mode="json"), "out": str(job.out)}
        with suppress(OSError):  # a process that has exited is reported by the reader
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def close_input(self) -> None:
        """Signal the end of jobs; the process saves its run and exits."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def wait(self) -> tuple[str, str]:
        """Wait for the process to exit; return how it ended, and the end of its standard error."""
        self.close_input()
        status = self.process.wait()
        self._reader.join()
        with self._stderr as file:
            file.seek(0)
            errors = file.read()[-STDERR_BYTES:].decode(errors="replace").strip()
        return _describe_exit(status), errors

    def _read_messages(self, inbox: "SimpleQueue[tuple[_Worker, dict[str, Any]]]") -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # a process that is killed may leave half a line
                    inbox.put((self, json.loads(line)))
        inbox.put((self, {"event": "exited"}))


def _describe_exit(status: int) -> str:
    """Describe the exit status of a process.

    >>> _describe_exit(-9)
    'the worker process was ended by SIGKILL (often: out of memory)'
    """
    if status >= 0:
        return f"the worker process ended with status {status}"
    name = signal.Signals(-status).name
    return f"the worker process was ended by {name}{' (often: out of memory)' if name == 'SIGKILL' else ''}"
