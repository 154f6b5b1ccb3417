"""Running the missing jobs of a grid on a pool of workers, with retries."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime

from spcl.files import write_json
from spcl.grids.base import Message, Pool
from spcl.grids.checks import check_jobs
from spcl.grids.plan import Job
from spcl.grids.pool import WorkerPool
from spcl.grids.progress import GridState, GridView, Running
from spcl.grids.view import SilentGridView
from spcl.runs import RunFolder

__all__ = ["FAILURE", "run_grid", "run_jobs"]

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
    succeeds. One that is lost with its machine is made again as often as that happens. A run that another process is
    making is left to that process, and checked again later.
    """
    return _Scheduler(list(jobs), pool, view, retries).complete()


class _Scheduler:
    """Queues of jobs that wait for a worker, or for another process."""

    def __init__(self, jobs: list[Job], pool: Pool, view: GridView, retries: int) -> None:
        self.pool, self.view, self.retries = pool, view, retries
        done = {job.name: job for job in jobs if job.is_done()}
        for job in done.values():
            _clean_up(job)
        self.waiting = deque(job for job in jobs if job.name not in done)
        self.later: deque[tuple[float, Job]] = deque()
        self.failures: Counter[str] = Counter()
        self.state = GridState(len(jobs), len(done), len(done))

    def complete(self) -> GridState:
        while self.waiting or self.later or self.state.running:
            self._requeue_busy()
            self._start_waiting()
            message = self.pool.next_message(TICK_SECONDS)
            if message is not None:
                self._handle(message)
            self.view.tick(self.state)
        return self.state

    def _requeue_busy(self) -> None:
        while self.later and self.later[0][0] <= time.monotonic():
            self.waiting.append(self.later.popleft()[1])

    def _start_waiting(self) -> None:
        while self.waiting and self.pool.has_room():
            job = self.waiting.popleft()
            self.state.running[job.name] = Running()
            self.pool.start(job)

    def _handle(self, message: Message) -> None:
        job, values = message.job, message.values
        if message.event == "step":
            self.state.busy.discard(job.name)
            self.state.running[job.name] = Running(**values)
            return
        del self.state.running[job.name]
        match message.event:
            case "done":
                self._finish(job, values["summary"], values["left_out"])
            case "busy":
                self.state.busy.add(job.name)
                self.later.append((time.monotonic() + BUSY_SECONDS, job))
            case "interrupted":
                self._fail(job, values["reason"])
            case "failed":
                self._fail(job, **values)
            case "lost":
                self.waiting.append(job)
                self.view.lost(job, self.state, values["reason"], job.is_begun())

    def _finish(self, job: Job, summary: str, skipped: int) -> None:
        self.state.done += 1
        self.state.busy.discard(job.name)
        _clean_up(job)
        self.view.finished(job, self.state, summary, skipped)

    def _fail(
        self, job: Job, reason: str, details: str = "", user_error: bool = False, out_of_memory: bool = False
    ) -> None:
        """Retry the job, unless only the user can correct the error or it has failed too often."""
        self.failures[job.name] += 1
        attempts = self.failures[job.name]
        again = not user_error and attempts <= self.retries
        if again:
            self.waiting.append(job)
        else:
            self.state.failed[job.name] = reason
            self.state.out_of_memory |= out_of_memory
        content = {"reason": reason, "attempts": attempts, "time": datetime.now(UTC).isoformat(), "details": details}
        with suppress(OSError):  # the folder itself may be the problem
            job.out.mkdir(parents=True, exist_ok=True)
            write_json(job.out / FAILURE, content)
        self.view.failed(job, self.state, reason, again)


def _clean_up(job: Job) -> None:
    """Remove checkpoints and failures of a complete run, which a process killed at its very end leaves behind."""
    with suppress(OSError):
        RunFolder(job.out).remove_checkpoints()
        (job.out / FAILURE).unlink(missing_ok=True)
