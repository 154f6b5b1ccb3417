"""A grid: complete and the same however often it, or its workers, are killed; failures that stay where they are."""

import io
import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from rich.console import Console
from typer.testing import CliRunner

from _runs import PATIENCE, metrics_in, results_in, start_command, wait_for
from spcl.cli.app import app
from spcl.errors import SpclError
from spcl.grids import (
    GridState,
    Job,
    LiveGridView,
    PlainGridView,
    Running,
    WorkerPool,
    local,
    parse_methods,
    parse_numbers,
    parse_sweep,
    plan_grid,
    run_grid,
    run_jobs,
    threads_per_job,
)
from spcl.grids.plan import check_folders, check_job_data
from spcl.grids.view import grid_picture
from spcl.methods import METHODS
from spcl.results.records import read_runs
from spcl.runs import RunFolder

SMALL = {"tasks": 3, "batch_size": 8, "memory_budget": 24, "threads": 1, "device": "cpu", "checkpoint_seconds": 0.0}
RUNS = 8
OUT_OF_MEMORY = """
import spcl.grids.worker
from spcl.errors import OutOfMemoryError

def execute(*given, **named):
    raise OutOfMemoryError("out of memory; choose a smaller batch_size, or make fewer runs at once")

spcl.grids.worker.execute = execute
"""


def plan(benchmark: Path, out: Path, **settings: object) -> list[Job]:
    base = {"benchmark": str(benchmark), **SMALL, **settings}
    return plan_grid(out, base, methods=["er", "soro"], scenarios=["task", "class"], configs=[0, 1], seeds=[0])


class RecordingView:
    """Keeps what it is told, and lets a test act at every tick."""

    def __init__(self, act: Callable[[GridState], None] = lambda state: None) -> None:
        self.act = act
        self.finished_jobs: list[str] = []
        self.failures: list[tuple[str, str, bool]] = []

    def tick(self, state: GridState) -> None:
        self.act(state)

    def finished(self, job: Job, state: GridState, summary: str, skipped: int) -> None:
        self.finished_jobs.append(job.name)

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        self.failures.append((job.name, reason, again))


@pytest.fixture(scope="module")
def undisturbed(benchmark: Path, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    view = RecordingView()
    state = run_jobs(plan(benchmark, out), pool, view)
    assert (state.total, state.done, state.failed, state.running) == (RUNS, RUNS, {}, {})
    assert sorted(view.finished_jobs) == sorted(results_in(out))
    return out


def assert_same_runs(out: Path, expected: Path) -> None:
    assert results_in(out) == results_in(expected)
    assert metrics_in(out) == metrics_in(expected)
    assert not list(out.rglob("checkpoint*"))
    assert not list(out.rglob("failure.json"))


# -- whole grids as processes of their own


def command_line(benchmark: Path, out: Path, jobs: int = 2) -> list[str]:
    settings = [f"--set={name}={value}" for name, value in SMALL.items()]
    choice = ["--methods", "er,soro", "--configs", "0-1", "--seeds", "0", "--jobs", str(jobs)]
    return ["grid", "--benchmark", str(benchmark), "--out", str(out), *choice, *settings]


def interrupt(process: BaseProcess, number: signal.Signals, log: Path, delay: float) -> int:
    """Send a signal some time after the first run is complete; the grid may end before. Return the exit status."""
    wait_for(lambda: f"/{RUNS}  " in log.read_text() or process.exitcode is not None)
    time.sleep(delay)
    assert process.pid is not None
    if process.exitcode is None:
        process.kill() if number == signal.SIGKILL else os.kill(process.pid, number)
    process.join(PATIENCE)
    assert process.exitcode is not None
    return process.exitcode


def begun_in(out: Path) -> bool:
    return any(path.stat().st_size for path in out.rglob("metrics.jsonl"))


def test_a_grid_killed_at_random_is_completed_exactly(benchmark: Path, undisturbed: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    left_unfinished = 0
    for attempt in range(5):  # where runs are fast, the first signal may find the grid complete: then once more
        out, log = tmp_path / f"out-{attempt}", tmp_path / "log"
        for number in (signal.SIGINT, signal.SIGKILL):
            log.write_text("")
            process = start_command(command_line(benchmark, out), log)
            status = interrupt(process, number, log, generator.uniform(0.0, 0.2))
            done = len(results_in(out))
            if status == 0 or f"{RUNS} of {RUNS} runs are complete in" in log.read_text():
                assert done == RUNS
                continue
            left_unfinished += len(metrics_in(out)) > done
            assert status == (130 if number == signal.SIGINT else -signal.SIGKILL)
            if number == signal.SIGINT:
                assert f"{done} of {RUNS} runs are complete; the same command continues" in log.read_text()
        if left_unfinished:
            break
    assert left_unfinished

    process = start_command(command_line(benchmark, out), log)
    process.join(PATIENCE)
    assert process.exitcode == 0, log.read_text()
    assert f"{RUNS} of {RUNS} runs are complete" in log.read_text()
    assert_same_runs(out, undisturbed)


def test_workers_save_and_stop_when_their_grid_is_killed(benchmark: Path, tmp_path: Path) -> None:
    slow = ["--set=batch_size=1", "--set=checkpoint_seconds=1000"]
    process = start_command([*command_line(benchmark, tmp_path / "out", jobs=1), *slow], tmp_path / "log")
    wait_for(lambda: begun_in(tmp_path))
    assert not list(tmp_path.rglob("checkpoint.safetensors"))
    process.kill()
    process.join()
    (lock,) = tmp_path.rglob(".lock")
    with FileLock(lock, timeout=PATIENCE):
        assert (lock.parent / "checkpoint.safetensors").exists()
        assert not results_in(tmp_path / "out")


def test_two_grids_on_one_folder_share_the_work(benchmark: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Also where one of them is killed at random and started again: no run is made twice."""
    generator, out = np.random.default_rng(0), tmp_path / "out"
    words, logs = command_line(benchmark, out, jobs=1), [tmp_path / f"log-{i}" for i in range(2)]
    processes = [start_command(words, log) for log in logs]
    made: dict[Path, int] = {}
    for victim, done in ((0, 1), (1, 4)):
        wait_for(lambda done=done: len(list(out.rglob("result.json"))) >= done)
        time.sleep(generator.uniform(0.0, 0.1))
        processes[victim].kill()
        processes[victim].join()
        made = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")} | made
        processes[victim] = start_command(words, logs[victim])
    for process, log in zip(processes, logs, strict=True):
        process.join(PATIENCE)
        assert process.exitcode == 0, log.read_text()
        assert f"{RUNS} of {RUNS} runs are complete" in log.read_text()
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert_same_runs(out, undisturbed)


# -- failures


def test_a_run_that_always_crashes_is_given_up_and_harms_no_other(
    benchmark: Path, pool: WorkerPool, undisturbed: Path, tmp_path: Path
) -> None:
    victim = "class/er/config-0/seed-0"

    def kill(state: GridState) -> None:
        for worker in pool._workers:
            if worker.job is not None and worker.job.name == victim and state.running[victim].steps:
                worker.kill()

    view = RecordingView(kill)
    jobs = plan(benchmark, tmp_path)
    state = run_jobs(jobs, pool, view, retries=1)
    assert view.failures == [(victim, state.failed[victim], again) for again in (True, False)]
    assert "SIGKILL" in state.failed[victim]
    assert state.done == RUNS - 1
    failure = json.loads((tmp_path / victim / "failure.json").read_text())
    assert (failure["reason"], failure["attempts"]) == (state.failed[victim], 2)

    again = RecordingView()
    assert run_jobs(jobs, pool, again).done == RUNS
    assert again.finished_jobs == [victim]
    assert_same_runs(tmp_path, undisturbed)


def test_a_run_whose_worker_is_told_to_stop_goes_on_in_another(benchmark: Path, tmp_path: Path) -> None:
    job, *_ = plan(benchmark, tmp_path, epochs=30)
    stopped: list[int] = []
    with WorkerPool(1) as pool:

        def stop_once(state: GridState) -> None:
            if not stopped and any(running.step for running in state.running.values()):
                stopped.append(pool._workers[0]._ranks[0]._process.pid)
                os.kill(stopped[0], signal.SIGTERM)

        view = RecordingView(stop_once)
        state = run_jobs([job], pool, view, retries=1)
        assert pool._workers[0]._ranks[0]._process.pid not in stopped
    assert (state.done, state.failed) == (1, {})
    ((_, reason, again),) = view.failures
    assert again, reason
    assert reason.startswith("stopped after step")


def test_damaged_folders_fail_alone_and_with_a_reason(benchmark: Path, pool: WorkerPool, tmp_path: Path) -> None:
    jobs = plan(benchmark, tmp_path)
    by_name = {job.name: job for job in jobs}
    in_the_way, no_settings, no_checkpoint = (
        by_name[f"task/{name}"] for name in ("er/config-0/seed-0", "er/config-1/seed-0", "soro/config-0/seed-0")
    )
    in_the_way.out.parent.mkdir(parents=True)
    in_the_way.out.write_text("a file where the folder should be")
    for job in (no_settings, no_checkpoint):
        job.out.mkdir(parents=True)
    RunFolder(no_settings.out).settings.write_text("{")
    RunFolder(no_checkpoint.out).checkpoint.write_bytes(b"damaged")

    check_folders(jobs)
    view = RecordingView()
    state = run_jobs(jobs, pool, view, retries=3)
    assert state.failed.keys() == {in_the_way.name, no_settings.name, no_checkpoint.name}
    assert state.done == RUNS - 3
    given_up = sorted(name for name, _, again in view.failures if not again)
    assert given_up == sorted(state.failed), view.failures  # a user error is not retried
    assert "cannot write to" in state.failed[in_the_way.name]
    assert "settings.json is damaged; remove the folder" in state.failed[no_settings.name]
    assert str(no_checkpoint.out) in state.failed[no_checkpoint.name]
    assert json.loads((no_settings.out / "failure.json").read_text())["reason"] == state.failed[no_settings.name]


def test_the_command_lists_what_failed(benchmark: Path, tmp_path: Path) -> None:
    arguments = [*command_line(benchmark, tmp_path, jobs=1), "--sweep", "optimizer=adam,sgd", "--methods", "er"]
    for run in ("task/er/optimizer=sgd/config-0/seed-0", "class/er/optimizer=sgd/config-1/seed-0"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "settings.json").write_text("damaged")
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 1
    assert "6 of 8 runs are complete" in outcome.output
    assert outcome.output.count("\nfailed: ") == 2
    assert "failed: task/er/optimizer=sgd/config-0/seed-0: " in outcome.output
    labels = {
        run.label for run in read_runs(tmp_path / "task/er/optimizer=adam", tmp_path / "task/er/optimizer=sgd/config-1")
    }
    assert labels == {"er (optimizer=adam)", "er (optimizer=sgd)"}


def test_a_run_that_another_process_makes_is_looked_at_again(
    benchmark: Path, pool: WorkerPool, undisturbed: Path, tmp_path: Path
) -> None:
    jobs = plan(benchmark, tmp_path)
    jobs[0].out.mkdir(parents=True)
    lock = FileLock(jobs[0].out / ".lock")
    lock.acquire()
    waited = []

    def release_at_the_end(state: GridState) -> None:
        if state.done == RUNS - 1 and state.busy:
            waited.append(state.busy.copy())
            lock.release()

    view = RecordingView(release_at_the_end)
    state = run_jobs(jobs, pool, view)
    assert waited
    assert waited[0] == {jobs[0].name}
    assert view.finished_jobs[-1] == jobs[0].name
    assert (state.done, state.busy, view.failures) == (RUNS, set(), [])
    assert_same_runs(tmp_path, undisturbed)


def test_workers_that_cannot_start_are_one_clear_error(
    benchmark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", str(tmp_path / "absent"))
    with WorkerPool(1) as pool, pytest.raises(SpclError, match="worker processes do not start"):
        run_jobs(plan(benchmark, tmp_path / "out"), pool, RecordingView())


def test_the_command_and_its_table_say_where_tasks_were_left_out(benchmark: Path, tmp_path: Path) -> None:
    words = [*command_line(benchmark, tmp_path, jobs=1), "--methods", "er", "--scenarios", "task", "--configs", "0"]
    outcome = CliRunner().invoke(app, [*words, "--sweep", "learning_rate=0.001,1e30"])
    assert outcome.exit_code == 0, outcome.output
    good, bad = sorted(line for line in outcome.output.splitlines() if "/seed-0: accuracy" in line)
    assert "skipped" not in good
    (result,) = (tmp_path / "task/er").glob("learning_rate=1e+30/*/*/result.json")
    times = sum(json.loads(result.read_text())["left_out"].values())
    assert times > 0
    assert f"tasks were skipped {times} times (loss or gradient not finite)" in bad
    table = CliRunner().invoke(app, ["table", str(tmp_path), "--format", "markdown"]).output
    assert "not finite, in 1 of 1 runs of ER (learning\\_rate=1e+30) on clusters." in table


# -- planning


def test_a_grid_is_one_call(benchmark: Path, undisturbed: Path, tmp_path: Path) -> None:
    jobs = plan(benchmark, tmp_path)
    state = run_grid(jobs, workers=2)
    assert (state.done, state.failed) == (RUNS, {})
    assert_same_runs(tmp_path, undisturbed)
    with pytest.raises(SpclError, match="choose another folder"):
        run_grid(plan(benchmark, tmp_path, learning_rate=0.1))


def test_what_is_done_is_not_made_again(benchmark: Path, pool: WorkerPool, undisturbed: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("result.json")}
    view = RecordingView()
    state = run_jobs(plan(benchmark, undisturbed), pool, view)
    assert (state.done, state.done_before, view.finished_jobs) == (RUNS, RUNS, [])
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("result.json")} == times


def test_what_a_run_left_that_was_killed_at_its_very_end_is_removed(
    benchmark: Path, pool: WorkerPool, undisturbed: Path
) -> None:
    job, before = plan(benchmark, undisturbed)[0], (results_in(undisturbed), metrics_in(undisturbed))
    RunFolder(job.out).checkpoint.write_bytes(b"")
    (job.out / "failure.json").write_text("{}")
    run_jobs([job], pool, RecordingView())
    assert (results_in(undisturbed), metrics_in(undisturbed)) == before
    assert not [*undisturbed.rglob("checkpoint*"), *undisturbed.rglob("failure.json")]


def test_a_dry_run_lists_and_makes_nothing(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = CliRunner().invoke(app, [*command_line(benchmark, out), "--dry-run"])
    assert outcome.exit_code == 0
    assert f"{RUNS} of {RUNS} runs would be made" in outcome.output
    assert str(out / "class/soro/config-1/seed-0") in outcome.output
    assert not out.exists()


def test_a_dry_run_refuses_configurations_that_no_protocol_has(tmp_path: Path) -> None:
    words = ["grid", "--benchmark", "ps-emnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    outcome = CliRunner().invoke(app, [*words, "--methods", "er", "--configs", "0-99", "--dry-run"])
    assert str(outcome.exception) == "there is no configuration 9; the protocol has 0 to 8"
    protocol = {"benchmark": "x", "batch_size": 128, "classes": 2}
    protocol["label_sets"] = [{"label_set": [[0], [1]], "timelines": [[[0, 3], [1, 4]]]}]
    (tmp_path / "one.json").write_text(json.dumps(protocol))
    words += ["--protocol", str(tmp_path / "one.json")]
    outcome = CliRunner().invoke(app, [*words, "--configs", "0-1", "--dry-run"])
    assert str(outcome.exception) == "there is no configuration 1; the protocol has 0 to 0"


def test_a_dry_run_says_when_the_data_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPCL_DATA", raising=False)
    words = ["grid", "--benchmark", "ps-emnist", "--out", str(tmp_path / "out"), "--methods", "er", "--dry-run"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0
    assert outcome.output.startswith("not checked against the data: EMNIST ByClass is in none of ")
    assert outcome.output.endswith("54 of 54 runs would be made\n")


def test_a_dry_run_checks_data_that_is_here(benchmark: Path, tmp_path: Path) -> None:
    words = [*command_line(benchmark, tmp_path / "out"), "--set", "tasks=100", "--dry-run"]
    assert "cannot split 6 classes into 100 tasks" in str(CliRunner().invoke(app, words).exception)


def test_a_grid_warns_once_of_tasks_with_few_steps(benchmark: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="a task of clusters trains for only 2 steps at batch_size = 64") as warned:
        check_job_data(plan(benchmark, tmp_path, batch_size=64))
    assert len(warned) == 1


def test_a_grid_names_the_next_commands(benchmark: Path, tmp_path: Path) -> None:
    words = [*command_line(benchmark, tmp_path, jobs=1), "--methods", "er", "--scenarios", "task", "--configs", "0"]
    lines = CliRunner().invoke(app, words).output.splitlines()
    assert lines[-3:] == [
        f"1 of 1 runs are complete in {tmp_path}",
        f"next: spcl table {tmp_path}",
        f"      spcl report {tmp_path}",
    ]


def test_a_grid_out_of_memory_names_the_flag(benchmark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PROGRAM", OUT_OF_MEMORY + local.PROGRAM)
    words = [*command_line(benchmark, tmp_path, jobs=1), "--methods", "er", "--scenarios", "task", "--configs", "0"]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 1
    assert "failed: task/er/config-0/seed-0: out of memory" in outcome.output
    assert "make fewer runs at once (--jobs), or choose a smaller batch (--set batch_size=…)" in outcome.output


def test_the_folder_of_a_grid_keeps_its_settings(benchmark: Path, undisturbed: Path) -> None:
    check_folders(plan(benchmark, undisturbed, threads=7, device="auto"))
    with pytest.raises(SpclError, match=r"holds a run with learning_rate = 0\.001, not 0\.1"):
        check_folders(plan(benchmark, undisturbed, learning_rate=0.1))


def test_sweeps_multiply_the_grid(tmp_path: Path) -> None:
    sweeps = [parse_sweep("method.sigma=1,1e2"), parse_sweep("paradigm=joint,serial")]
    base = {"benchmark": "ps-emnist", "method": {"lambda_": 3.0}}
    jobs = plan_grid(tmp_path, base, methods=["soro"], scenarios=["task"], configs=[4], seeds=[1, 2], sweeps=sweeps)
    assert {job.name for job in jobs} == {
        f"task/soro/sigma={sigma}/paradigm={paradigm}/config-4/seed-{seed}"
        for sigma in (1, 100)
        for paradigm in ("joint", "serial")
        for seed in (1, 2)
    }
    for job in jobs:
        assert job.out == tmp_path / job.name
        assert f"sigma={job.settings.method['sigma']:g}/paradigm={job.settings.paradigm}" in job.name
        assert (job.settings.method["lambda_"], job.settings.config) == (3.0, 4)


def test_lists_are_swept(tmp_path: Path) -> None:
    sweeps = [parse_sweep("optimizer.betas=[0.9,0.9],[0.9,0.999]")]
    one = {"methods": ["er"], "scenarios": ["task"], "configs": [0], "seeds": [0]}
    jobs = plan_grid(tmp_path, {"benchmark": "ps-emnist"}, **one, sweeps=sweeps)
    assert [job.settings.optimizer["betas"] for job in jobs] == [[0.9, 0.9], [0.9, 0.999]]
    assert len({job.name for job in jobs}) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "er,sorro"], "there is no method 'sorro'; did you mean 'soro'"),
        (["--scenarios", "tusk"], "scenario = 'tusk'"),
        (["--configs", "0-9"], "there is no configuration 9"),
        (["--configs", "8-0"], "'8-0' is not a list of numbers"),
        (["--seeds", "99999999999999999999999"], "seed = 99999999999999999999999"),
        (["--sweep", "tasks=100,2"], "cannot split 6 classes into 100 tasks"),
        (["--sweep", "validation=0.0001,0.5"], "leaves nothing to validate on"),
        (["--set", "method.sigma=1"], "method 'er': there is no setting 'sigma'"),
        (["--set", "seed=3"], "seed is planned run by run; give it as seeds"),
        (
            ["--sweep", "method.sigma"],
            "write, for example, method.sigma=1,10,100 (--sweep)",
        ),
        (["--sweep", "learning_rat=1"], "did you mean 'learning_rate'"),
        (["--set", "method=soro"], "method.name is planned run by run; give it as methods"),
        (["--benchmark", "absent.npz"], "absent.npz does not exist"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    benchmark: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    outcome = CliRunner().invoke(app, [*command_line(benchmark, tmp_path / "out"), *arguments])
    assert isinstance(outcome.exception, SpclError), outcome.output
    assert message in str(outcome.exception)
    assert not (tmp_path / "out").exists()


def test_data_is_loaded_once_to_check_all_that_is_made_of_it(
    benchmark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps = [parse_sweep("tasks=2,3"), parse_sweep("batch_size=4,8"), parse_sweep("validation=0,0.5")]
    base = {"benchmark": str(benchmark)}
    jobs = plan_grid(tmp_path, base, methods=["er"], scenarios=["task"], configs=[0, 1], seeds=[0, 1], sweeps=sweeps)
    loaded, load = [], np.load
    monkeypatch.setattr(np, "load", lambda *given, **named: (loaded.append(given), load(*given, **named))[1])
    check_job_data(jobs)
    assert len(loaded) == 2  # with a part held out, and without


def test_names_and_numbers() -> None:
    assert parse_methods("all") == list(METHODS)
    assert parse_methods("torchjd:UPGrad,er") == ["torchjd:UPGrad", "er"]
    assert parse_numbers("5, 0-2") == [0, 1, 2, 5]
    for wrong in ("", "a", "1-", "-1", "1.5"):
        with pytest.raises(SpclError, match="is not a list of numbers"):
            parse_numbers(wrong)
    assert threads_per_job(10**6) == 1


def test_a_grid_too_large_to_plan_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpclError, match=r"'0-99999999999999' is 100,000,000,000,000 numbers; give at most 10,000"):
        parse_numbers("0-99999999999999")
    assert len(parse_numbers("0-9999")) == 10_000
    words = ["grid", "--benchmark", "ps-glyphs", "--methods", "er", "--seeds", "0-9999", "--out", str(tmp_path / "g")]
    outcome = CliRunner().invoke(app, [*words, "--dry-run"])
    assert "a grid of 180,000 runs is too large to plan at once, the most is 10,000; plan" in str(outcome.exception)
    assert not list(tmp_path.iterdir())


# -- views


def test_views_say_what_happens(tmp_path: Path) -> None:
    (job, *_) = plan_grid(tmp_path, {}, methods=["er"], scenarios=["task"], configs=[0], seeds=[0])
    state = GridState(
        10, done=4, done_before=2, failed={"x": "y"}, busy={"b"}, running={job.name: Running(5, 10, "beta")}
    )
    state.started -= 25
    assert state.seconds_left() == pytest.approx(25 / 2.5 * (10 - 1 - 4.5), rel=0.01)

    plain = Console(file=io.StringIO(), width=60)
    with PlainGridView(plain) as view:
        view.finished(job, state, "accuracy 81.23 %, F -3.00 %", 0)
        view.finished(job, state, "accuracy 81.23 %, F -3.00 %", 7)
        view.failed(job, state, "[bold] reason", again=False)
        view.lost(job, state, "the node beta was lost", begun=True)
    assert plain.file.getvalue().splitlines() == [
        " 4/10  task/er/config-0/seed-0: accuracy 81.23 %, F -3.00 %, about 0:00:45 left",
        " 4/10  task/er/config-0/seed-0: accuracy 81.23 %, F -3.00 %, "
        "tasks were skipped 7 times (loss or gradient not finite), about 0:00:45 left",
        " 4/10  task/er/config-0/seed-0: failed: [bold] reason",
        " 4/10  task/er/config-0/seed-0: lost, will resume from its last checkpoint: the node beta was lost",
    ]

    live = Console(file=io.StringIO(), width=120, force_terminal=True)
    with LiveGridView(live) as view:
        view.tick(state)
        view.finished(job, state, "accuracy 81.23 %, F -3.00 %", 0)
        assert "skipped" not in live.file.getvalue()
        view.finished(job, state, "accuracy 81.23 %, F -3.00 %", 7)
        view.failed(job, state, "[bold] reason", again=True)
        view.lost(job, state, "the node beta was lost", begun=False)
    assert "seed-0: tasks were skipped 7 times" in live.file.getvalue()
    assert "will be retried" in live.file.getvalue()
    assert "lost, will start again" in live.file.getvalue()
    assert "[bold] reason" in live.file.getvalue()
    picture = Console(file=io.StringIO(), width=120)
    picture.print(grid_picture(state))
    text = picture.file.getvalue()
    assert "4/10 runs" in text
    assert "1 failed" in text
    assert "step 5 of 10  on beta" in text
