"""Long-lived processes of this machine that make runs: one, or several that make each run together."""

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
from queue import SimpleQueue
from typing import Any, NamedTuple

from spcl.grids.plan import Job
from spcl.grids.ranks import free_port, rank_environment

__all__ = ["Inbox", "Sent", "Worker"]

STDERR_BYTES = 4000
PROGRAM = "from spcl.grids.worker import main; main()"


class Sent(NamedTuple):
    """A message of one of the processes of a worker: its values, with the event among them."""

    worker: "Worker"
    rank: int
    values: dict[str, Any]


Inbox = SimpleQueue[Sent]


class Worker:
    """The processes that make one run at a time, as its ranks if they are several.

    Args:
        inbox: receives what the processes send, and ``exited`` when one has ended.
        processes: how many there are.
        threads: CPU threads of each.
        split: what they split, see :class:`spcl.distributed.World`.

    Attributes:
        job: the run that they make now.
        ready: whether they have started.
    """

    def __init__(self, inbox: Inbox, processes: int, threads: int, split: str) -> None:
        self.job: Job | None = None
        self.ready = False
        endpoint = ("127.0.0.1", free_port() if processes > 1 else 0)
        self._ranks = [
            _Process(
                {
                    "OMP_NUM_THREADS": str(threads),
                    **os.environ,
                    **rank_environment(rank, processes, endpoint, split=split),
                },
                partial(self._forward, inbox, rank),
            )
            for rank in range(processes)
        ]

    def _forward(self, inbox: Inbox, rank: int, values: dict[str, Any]) -> None:
        inbox.put(Sent(self, rank, values))

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
        """Wait for a process to exit, and return its status; the first one is that which saves the run."""
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
                with suppress(ValueError):  # a process that is killed may leave half a line
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
