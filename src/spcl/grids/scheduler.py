"""Running the missing jobs of a grid on a pool of workers, with retries."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from typing import Any

from spcl._util.files import write_json
from spcl.grids.base import JobMessage, Pool
from spcl.grids.local import WorkerPool
from spcl.grids.plan import Job, check_jobs
from spcl.grids.view import GridState, GridView, Running, SilentGridView
from spcl.runs import RunFolder

FAILURE = "failure.json"
TICK_SECONDS = 0.2
BUSY_SECONDS = 1.0


def run_grid(
    jobs: Sequence[Job],
    workers: int | Pool = 1,
    *,
    view: AbstractContextManager[GridView] | None = None,
    retries: int = 1,
) -> GridState:
    """Check the folders and data of all jobs, then run those that are missing.

    They are made by ``workers`` processes of this machine, or by another pool: ``run_grid(jobs, RayPool("head:6379"))``
    makes them on a Ray cluster. Interrupting it (Ctrl-C) lets every worker save its run; calling it again continues.

    Raises:
        SpclError: before anything runs, if a folder holds another run, or data is missing or does not fit.
    """
    check_jobs(jobs)
    workers = WorkerPool(workers) if isinstance(workers, int) else workers
    with workers as pool, view or SilentGridView() as shown:
        return run_jobs(jobs, pool, shown, retries)


def run_jobs(jobs: Iterable[Job], pool: Pool, view: GridView, retries: int = 1) -> GridState:
    """Run the jobs that are not complete yet, as many at once as the pool has room for.

    A run that crashes is retried up to ``retries`` times; the reason is kept in ``failure.json`` in its folder until it
    succeeds. A run that is lost with its machine is made again, as often as that happens. A run that another process
    is making is left to that process, and checked again later.
    """
    return _Scheduler(list(jobs), pool, view, retries).complete()


class _Scheduler:
    """Queues of jobs that wait for a worker, or for another process."""

    def __init__(self, jobs: list[Job], pool: Pool, view: GridView, retries: int) -> None:
        self._pool, self._view, self._retries = pool, view, retries
        done = {job.name: job for job in jobs if job.is_done()}
        for job in done.values():
            _clean_up(job)
        self._waiting = deque(job for job in jobs if job.name not in done)
        self._busy: deque[tuple[float, Job]] = deque()  # when to look again whether the other process is through
        self._failures: Counter[str] = Counter()
        self._state = GridState(len(jobs), len(done), len(done))

    def complete(self) -> GridState:
        while self._waiting or self._busy or self._state.running:
            while self._busy and self._busy[0][0] <= time.monotonic():
                self._waiting.append(self._busy.popleft()[1])
            while self._waiting and self._pool.has_room():
                job = self._waiting.popleft()
                self._state.running[job.name] = Running()
                self._pool.start(job)
            message = self._pool.next_message(TICK_SECONDS)
            if message is not None:
                self._handle(message)
            self._view.tick(self._state)
        return self._state

    def _handle(self, message: JobMessage) -> None:
        job, values, state = message.job, message.values, self._state
        if message.event == "step":
            state.busy.discard(job.name)
            state.running[job.name] = Running(**values)
            return
        del state.running[job.name]
        match message.event:
            case "done":
                state.done += 1
                state.busy.discard(job.name)
                _clean_up(job)
                self._view.finished(job, state, values["summary"], values["skipped"])
            case "busy":
                state.busy.add(job.name)
                self._busy.append((time.monotonic() + BUSY_SECONDS, job))
            case "lost":
                self._waiting.append(job)
                self._view.lost(job, state, values["reason"], job.is_begun())
            case "interrupted" | "failed":
                self._fail(job, values)

    def _fail(self, job: Job, values: dict[str, Any]) -> None:
        """Retry the job, unless only the user can correct the error or it has failed too often."""
        self._failures[job.name] += 1
        reason, attempts = values["reason"], self._failures[job.name]
        again = not values.get("user_error") and attempts <= self._retries
        if again:
            self._waiting.append(job)
        else:
            self._state.failed[job.name] = reason
            self._state.out_of_memory |= values.get("out_of_memory", False)
        details = values.get("details", "")
        content = {"reason": reason, "attempts": attempts, "time": datetime.now(UTC).isoformat(), "details": details}
        with suppress(OSError):  # the folder itself may be the problem
            job.out.mkdir(parents=True, exist_ok=True)
            write_json(job.out / FAILURE, content)
        self._view.failed(job, self._state, reason, again)


def _clean_up(job: Job) -> None:
    """Remove checkpoints and failures of a complete run, which a process killed at its very end leaves behind."""
    with suppress(OSError):
        RunFolder(job.out).remove_checkpoints()
        (job.out / FAILURE).unlink(missing_ok=True)
