"""Grids whose runs have several processes: the same runs, however often a rank is killed or the grid is stopped."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from _runs import PATIENCE, metrics_in, rank_process, results_in, start_command, wait_for
from spcl.cli.grid import EngineFlags
from spcl.errors import SpclError
from spcl.grids import GridState, Job, SilentGridView, WorkerPool, plan_grid, run_jobs
from spcl.runs import execute

SMALL = {"tasks": 3, "batch_size": 4, "memory_budget": 24, "threads": 1, "device": "cpu"}


def plan(benchmark: Path, out: Path, **settings: object) -> list[Job]:
    base = {"benchmark": str(benchmark), **SMALL, **settings}
    return plan_grid(out, base, methods=["er", "soro"], scenarios=["class"], configs=[0], seeds=[0])


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerPool]:
    with WorkerPool(1, processes_per_run=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def undisturbed(benchmark: Path, ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    state = run_jobs(plan(benchmark, out), ranks, SilentGridView())
    assert (state.failed, state.done) == ({}, 2)
    for result in out.rglob("result.json"):
        assert json.loads(result.read_text())["environment"]["ranks"] == 2
    return out


def assert_same_runs(out: Path, expected: Path) -> None:
    assert results_in(out) == results_in(expected)
    assert metrics_in(out) == metrics_in(expected)
    assert {path.name for path in out.rglob("*") if path.is_file()} == {
        path.name for path in expected.rglob("*") if path.is_file()
    }


class KillingView(SilentGridView):
    """Kills the second rank of the first run once that has a checkpoint; keeps what fails."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.killed = ""
        self.failures: list[tuple[str, str, bool]] = []

    def tick(self, state: GridState) -> None:
        for name in state.running:
            if not self.killed and (self.out / name / "checkpoint.safetensors").exists():
                self.killed = name
                os.kill(rank_process(os.getpid(), 1), signal.SIGKILL)

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        self.failures.append((job.name, reason, again))


def test_a_run_of_which_a_rank_is_killed_is_made_again_exactly(
    benchmark: Path, ranks: WorkerPool, undisturbed: Path, tmp_path: Path
) -> None:
    view = KillingView(tmp_path)
    state = run_jobs(plan(benchmark, tmp_path, checkpoint_seconds=0.0), ranks, view)
    assert (state.failed, state.done) == ({}, 2)
    reason = "the worker process of rank 1 was ended by SIGKILL (often: out of memory)"
    assert view.failures == [(view.killed, reason, True)]
    assert_same_runs(tmp_path, undisturbed)


def test_ctrl_c_saves_a_run_of_ranks_which_is_then_continued(
    benchmark: Path, ranks: WorkerPool, undisturbed: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    settings = [f"--set={name}={value}" for name, value in SMALL.items() if name != "threads"]
    words = ["grid", f"--benchmark={benchmark}", f"--out={out}", "--methods=er,soro", "--scenarios=class"]
    words += ["--configs=0", "--seeds=0", "--processes-per-run=2", "--set=checkpoint_seconds=1000", *settings]
    process = start_command(words, log)
    wait_for(lambda: any(path.read_text().count("\n") > 3 for path in out.rglob("metrics.jsonl")))
    os.kill(int(process.pid or 0), signal.SIGINT)
    process.join(PATIENCE)
    assert process.exitcode == 130, log.read_text()
    (checkpoint,) = out.rglob("checkpoint.safetensors")
    assert json.loads(checkpoint.with_name("settings.json").read_text())["threads"] == 1
    assert run_jobs(plan(benchmark, out), ranks, SilentGridView()).done == 2
    assert_same_runs(out, undisturbed)


def test_ranks_leave_a_run_to_another_process_and_stay_ready(
    benchmark: Path, ranks: WorkerPool, undisturbed: Path, tmp_path: Path
) -> None:
    first, _ = jobs = plan(benchmark, tmp_path)
    first.out.mkdir(parents=True)
    lock = FileLock(first.out / ".lock")
    lock.acquire()
    seen: list[int] = []

    class ReleasingView(SilentGridView):
        def tick(self, state: GridState) -> None:
            seen.append(rank_process(os.getpid(), 1))
            if state.busy:
                lock.release()

    assert run_jobs(jobs, ranks, ReleasingView()).done == 2
    assert len(set(seen)) == 1
    assert_same_runs(tmp_path, undisturbed)


def test_ranks_split_what_the_command_says(benchmark: Path, tmp_path: Path) -> None:
    job, _ = plan(benchmark, tmp_path / "grid", backbone={"name": "mlp"})
    with EngineFlags(processes_per_run=2, split="data").pool() as pool:
        assert run_jobs([job], pool, SilentGridView()).done == 1
    result = json.loads((job.out / "result.json").read_text())
    assert result["environment"]["split"] == "1x2"
    expected = execute(job.settings, tmp_path / "one").model_dump()
    assert [result[key] for key in ("tasks", "confusion")] == [expected[key] for key in ("tasks", "confusion")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (EngineFlags(split="data"), "--split data is for several processes; add --processes-per-run, or leave it out"),
        (EngineFlags(split="2x2", processes_per_run=2), "the split 2x2 is for 4 ranks, but there are 2; start 4, or"),
        (EngineFlags(split="rows", processes_per_run=2), "the split is 'rows'; give 'tasks', 'data', or the number of"),
    ],
)
def test_a_split_that_does_not_fit_the_processes_is_refused_before_any_starts(flags: EngineFlags, message: str) -> None:
    with pytest.raises(SpclError, match=message):
        flags.pool()
