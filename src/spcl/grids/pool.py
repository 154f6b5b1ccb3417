"""A pool of worker processes: long-lived, replaced when they die, stopped when nobody needs them any more."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Self

import torch

from spcl.errors import SpclError
from spcl.grids.plan import Job

__all__ = ["Message", "WorkerPool", "threads_per_job"]

FAILED_STARTS = 3
LAST_WORDS = 4000
PROGRAM = "from spcl.grids.worker import main; main()"


def threads_per_job(jobs: int) -> int:
    """The CPU threads each of so many runs at once may use: more than there are cores would slow all of them down."""
    return max(1, torch.get_num_threads() // jobs)


@dataclass(frozen=True)
class Message:
    """What a worker says of its job: ``step``, ``done``, ``busy``, ``interrupted`` or ``failed``.

    ``failed`` comes with a ``reason``, its ``details``, and whether it is ``mendable``: an error for the user to put
    right, so that trying again as it is makes no sense.
    """

    job: Job
    event: str
    values: dict[str, Any] = field(default_factory=dict)


class WorkerPool:
    """Up to ``size`` processes that make runs, one after another. A process that dies fails its job and no other.

    Leaving the ``with`` block tells the processes to save what they are doing and waits for them; Ctrl-C meanwhile
    ends them at once.
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
        """Whether another job can start now."""
        return len(self._workers) < self._size or any(worker.job is None for worker in self._workers)

    def start(self, job: Job) -> None:
        """Give the job to a free process, or to a new one."""
        worker = next((worker for worker in self._workers if worker.job is None), None)
        if worker is None:
            worker = _Worker(self._inbox, threads_per_job(self._size))
            self._workers.append(worker)
        worker.give(job)

    def next_message(self, timeout: float) -> Message | None:
        """What a worker says next; None if all are silent for so many seconds."""
        try:
            worker, said = self._inbox.get(timeout=timeout)
        except Empty:
            return None
        job, event = worker.job, said.pop("event")
        if event == "ready":
            worker.ready, self._failed_starts = True, 0
        elif event == "gone":
            return self._gone(worker)
        elif job is not None:
            if event != "step":
                worker.job = None
            return Message(job, event, said)
        return None

    def _gone(self, worker: "_Worker") -> Message | None:
        self._workers.remove(worker)
        reason, last_words = worker.end()
        job = worker.job
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                raise SpclError(f"worker processes do not start: {reason}\n{last_words}")
            if job is not None:
                self.start(job)
            return None
        if job is None:
            return None
        return Message(job, "failed", {"reason": reason, "details": last_words, "mendable": False})

    def close(self) -> None:
        """Let every process save what it is doing and stop."""
        try:
            for worker in self._workers:
                worker.stop()
            for worker in self._workers:
                worker.process.wait()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.end()
            self._workers.clear()


class _Worker:
    """One process, the thread that listens to it, and the job it has."""

    def __init__(self, inbox: "SimpleQueue[tuple[_Worker, dict[str, Any]]]", threads: int) -> None:
        self.job: Job | None = None
        self.ready = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            start_new_session=True,  # Ctrl-C reaches only the parent, which tells its workers in its own way
        )
        self._listener = threading.Thread(target=self._listen, args=(inbox,), daemon=True)
        self._listener.start()

    def _listen(self, inbox: "SimpleQueue[tuple[_Worker, dict[str, Any]]]") -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # a process that is killed may leave half a line
                    inbox.put((self, json.loads(line)))
        inbox.put((self, {"event": "gone"}))

    def give(self, job: Job) -> None:
        """Let the process make this run."""
        assert self.process.stdin is not None
        self.job = job
        order = {"settings": job.settings.model_dump(mode="json"), "out": str(job.out)}
        with suppress(OSError):  # of a process that is gone we hear from its listener
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """Tell the process that nothing more comes."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def end(self) -> tuple[str, str]:
        """Wait for the process; how it ended, and the last of what it wrote to standard error."""
        self.stop()
        status = self.process.wait()
        self._listener.join()
        with self._stderr as file:
            file.seek(0)
            last_words = file.read()[-LAST_WORDS:].decode(errors="replace").strip()
        return _ending(status), last_words


def _ending(status: int) -> str:
    """How a process ended.

    >>> _ending(-9)
    'the worker process was ended by SIGKILL (often: out of memory)'
    """
    if status >= 0:
        return f"the worker process ended with status {status}"
    name = signal.Signals(-status).name
    return f"the worker process was ended by {name}{' (often: out of memory)' if name == 'SIGKILL' else ''}"
