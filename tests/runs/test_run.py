"""A run: its record, its measures, its determinism, and what happens when it is interrupted, killed or refused."""

import gc
import json
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from small_benchmark import StopAtStep, small_settings
from spcl.checkpoint import read_newest, write_checkpoint
from spcl.data.samples import hold_out
from spcl.errors import OutOfMemoryError, SpclError
from spcl.learner import Learner, StepReport
from spcl.runs import (
    InterruptedRunError,
    RunFolder,
    RunResult,
    SilentView,
    UnfinishedRunError,
    execute,
    load_benchmark,
    load_settings_file,
    make_problem,
    records,
    resolve_settings,
)
from spcl.runs.run import Progress
from spcl.streams import ParallelStream

SHARED = Path(__file__).resolve().parents[3] / "shared"


def without_times(result: RunResult) -> RunResult:
    return result.model_copy(update={"seconds": {}})


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_record_is_complete_and_consistent(benchmark: Path, tmp_path: Path, scenario: str) -> None:
    settings = small_settings(benchmark, scenario=scenario, evaluate_every=5)
    result = execute(settings, tmp_path / "run")
    lines = metrics_of(tmp_path / "run")
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    steps = [line for line in lines if line["kind"] == "step"]
    at_end = {task: line["accuracy"][task] for line in evaluations for task in line["ended"]}
    final = evaluations[-1]["accuracy"]

    assert lines[0]["kind"] == "start"
    assert lines[0]["scenario"] == scenario == result.scenario
    assert len(steps) == result.steps
    assert result.model_dump()["tasks"] == {task: {"at_end": at_end[task], "final": final[task]} for task in final}
    assert result.accuracy == pytest.approx(np.mean(list(final.values())))
    assert result.forgetting == pytest.approx(np.mean([final[task] - at_end[task] for task in final]))
    for number, (task, table) in enumerate(result.confusion.items()):
        counts = np.array(table)
        offset = 0 if scenario == "task" else 2 * number
        assert counts.sum(axis=1).tolist() == [20, 20]
        assert 100 * np.trace(counts[:, offset:]) / counts.sum() == pytest.approx(final[task])
    assert resolve_settings(load_settings_file(tmp_path / "run" / "settings.json")) == settings
    assert result.environment is not None
    assert result.environment.torch == torch.__version__
    assert result.data is not None
    assert str(result.data) == "clusters: 240 + 120 samples of 8, 6 classes"
    assert RunFolder(tmp_path / "run").read_result() == result


@pytest.mark.parametrize("evaluate_every", [None, 1, 5])
def test_anytime_is_the_mean_over_steps_of_the_tasks_seen(
    benchmark: Path, tmp_path: Path, evaluate_every: int | None
) -> None:
    result = execute(small_settings(benchmark, evaluate_every=evaluate_every), tmp_path / "run")
    evaluations = {
        line["step"]: line["accuracy"] for line in metrics_of(tmp_path / "run") if line["kind"] == "evaluation"
    }
    at_every_step = []
    for step in range(result.steps or 0):
        upcoming = evaluations[min(each for each in evaluations if each >= step)]
        at_every_step.append(np.mean(list(upcoming.values())))
    assert result.anytime == pytest.approx(np.mean(at_every_step))
    assert f"anytime {result.anytime:.2f} %" in result.summary


def test_anytime_is_unknown_for_a_run_that_an_earlier_version_began(benchmark: Path, tmp_path: Path) -> None:
    progress = Progress()
    progress.evaluated(4, 50.0)
    progress.evaluated(10, 100.0)
    assert progress.anytime == pytest.approx(80.0)
    (resumed := Progress()).load_state_dict(progress.state_dict())
    assert resumed == progress
    old = {name: value for name, value in progress.state_dict().items() if name not in ("anytime", "evaluated_steps")}
    execute(settings := small_settings(benchmark), tmp_path / "whole")
    with pytest.raises(InterruptedRunError):
        execute(settings, tmp_path / "run", view=StopAtStep(12))
    saved = read_newest(path := tmp_path / "run" / "checkpoint.safetensors")
    saved["sources"]["progress"] = {name: saved["sources"]["progress"][name] for name in old}
    write_checkpoint(path, saved)
    assert execute(settings, tmp_path / "run", resume=True).anytime is None


def test_anytime_is_unknown_where_tasks_are_evaluated_one_by_one(benchmark: Path, tmp_path: Path) -> None:
    assert execute(small_settings(benchmark, evaluate="ended"), tmp_path / "run").anytime is None
    both = small_settings(benchmark, evaluate="ended", evaluate_every=1)
    assert execute(both, tmp_path / "both").anytime == pytest.approx(
        execute(small_settings(benchmark, evaluate_every=1), tmp_path / "seen").anytime, abs=3.0
    )


@pytest.mark.parametrize(
    "change",
    [
        {"backbone": {"name": "mlp", "hidden": [-1]}},
        {"config": 99},
        {"trackers": ["tensorboard"], "frozen": ["no such layer"]},
        {"method": {"name": "er"}, "tasks": 60},
        {"augment": ["crop"]},
    ],
)
def test_a_run_refused_before_the_first_step_leaves_nothing(
    benchmark: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    settings = small_settings(benchmark, **change)
    with pytest.raises(SpclError):
        execute(settings, tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").touch()
    with pytest.raises(SpclError):
        execute(settings, tmp_path / "old")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.name != ".lock"}
    assert left == {"old", "old/notes.txt"}
    execute(small_settings(benchmark), tmp_path / "new")


def test_learns_and_names_losses_and_stability(benchmark: Path, tmp_path: Path) -> None:
    result = execute(small_settings(benchmark), tmp_path / "run")
    steps = [line for line in metrics_of(tmp_path / "run") if line["kind"] == "step"]
    several = [line for line in steps if len(line["losses"]) > 1]
    assert result.accuracy > 80.0
    assert several
    for line in several:
        assert set(line["weights"]) == set(line["losses"])
        assert 1.0 <= line["after"]["condition_number"] < line["before"]["condition_number"]


def test_same_settings_give_the_same_result(benchmark: Path, tmp_path: Path) -> None:
    first, second = (execute(small_settings(benchmark, seed=3), tmp_path / name) for name in "ab")
    other = execute(small_settings(benchmark, seed=4), tmp_path / "c")
    assert without_times(first) == without_times(second)
    assert without_times(first) != without_times(other)


def test_a_run_that_is_over_holds_nothing(benchmark: Path, tmp_path: Path) -> None:
    def alive() -> list[str]:
        kinds = (Learner, ParallelStream, torch.nn.Module)
        return sorted(type(thing).__name__ for thing in gc.get_objects() if issubclass(type(thing), kinds))

    execute(small_settings(benchmark), tmp_path / "first")  # PyTorch imports a part of itself, which holds on to it
    gc.collect()
    before = alive()
    gc.disable()
    try:
        execute(small_settings(benchmark), tmp_path / "second")
        assert alive() == before
    finally:
        gc.enable()


def test_finished_run_is_not_run_again(benchmark: Path, tmp_path: Path) -> None:
    settings = small_settings(benchmark)
    execute(settings, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns
    execute(settings, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "content",
    [
        *("[1, 2]", "{}", "null", '{"accuracy": 3', '{"accuracy": null}'),
        '{"accuracy": 80.0, "forgetting": -5.0}',
        '{"accuracy": true, "forgetting": -5.0, "tasks": {}}',
        '{"accuracy": "80.0", "forgetting": -5.0, "tasks": {}}',
        '{"accuracy": 80.0, "forgetting": -5.0, "tasks": {"task-0": {"at_end": 80.0, "final": null}}}',
        '{"accuracy": 80.0, "forgetting": -5.0, "tasks": {}, "confusion": []}',
    ],
)
def test_what_is_not_a_result_does_not_count_as_one(benchmark: Path, tmp_path: Path, content: str) -> None:
    whole = execute(small_settings(benchmark), tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text(content)
    assert without_times(execute(small_settings(benchmark), tmp_path / "run")) == without_times(whole)


def test_a_finished_run_of_other_settings_is_refused(benchmark: Path, tmp_path: Path) -> None:
    execute(small_settings(benchmark), tmp_path / "run")
    before = (tmp_path / "run" / "result.json").read_text()
    with pytest.raises(SpclError, match=r"holds a run with method.name = soro, not er"):
        execute(small_settings(benchmark, method={"name": "er"}), tmp_path / "run")
    assert (tmp_path / "run" / "result.json").read_text() == before


def test_settings_mean_the_same_from_everywhere(
    benchmark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(benchmark.parent)
    chosen = resolve_settings({"benchmark": benchmark.name, "data_dir": "."})
    assert (chosen.benchmark, chosen.data_dir) == (str(benchmark.resolve()), str(benchmark.parent.resolve()))
    monkeypatch.chdir(tmp_path)
    assert resolve_settings(chosen.model_dump()) == chosen
    assert resolve_settings({"benchmark": "ps-glyphs"}).benchmark == "ps-glyphs"


class Witness(SilentView):
    """Keeps the reports, and sees to it that something happens after a certain step."""

    def __init__(self, when: int = -1, what: Callable[[], None] = lambda: None) -> None:
        self.reports: list[StepReport] = []
        self.when, self.what = when, what

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        self.reports.append(report)
        if report.step == self.when:
            self.what()


class Diary:
    """A tracker that writes down everything it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.closed = False

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        self.told.append({"kind": "step", "step": step, **values})

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None:
        self.told.append({"kind": "evaluation", "step": step, "accuracy": dict(accuracies)})

    def result(self, measures: Mapping[str, float]) -> None:
        self.final = dict(measures)

    def close(self) -> None:
        self.closed = True


def test_every_step_is_recorded_and_tracked_as_it_was_reported(benchmark: Path, tmp_path: Path) -> None:
    witness, diary = Witness(), Diary()
    settings = small_settings(benchmark, evaluate_every=7)
    result = execute(settings, tmp_path / "run", view=witness, trackers=(diary,))
    assert diary.final == {"A": result.accuracy, "F": result.forgetting, "anytime": result.anytime}
    lines = metrics_of(tmp_path / "run")
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == len(witness.reports)
    for line, report in zip(steps, witness.reports, strict=True):
        assert (line["losses"], line["weights"]) == (report.losses, report.weights)
        assert list(line["norms"]) == list(report.losses)
        np.testing.assert_allclose(list(line["norms"].values()), report.before.gramian.diagonal().sqrt())
        for stability, recorded in ((report.before, line["before"]), (report.after, line["after"])):
            assert stability is not None
            assert (recorded is None) == (len(stability.gramian) < 2)
            if recorded is not None:
                assert recorded["condition_number"] == stability.condition_number
                assert recorded["cosine"] == stability.mean_cosine
                assert recorded["magnitude_similarity"] == stability.mean_magnitude_similarity
    assert diary.told == [{k: v for k, v in line.items() if k != "ended"} for line in lines[1:]]
    assert diary.closed


def test_records_do_not_depend_on_when_they_are_written(
    benchmark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(small_settings(benchmark), tmp_path / "together")
    monkeypatch.setattr(records, "WRITE_SECONDS", 0.0)
    execute(small_settings(benchmark), tmp_path / "one by one")
    assert metrics_of(tmp_path / "together") == metrics_of(tmp_path / "one by one")


def test_a_run_that_fails_leaves_the_records_of_all_its_steps(benchmark: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    diary = Diary()
    with pytest.raises(ZeroDivisionError):
        execute(small_settings(benchmark), tmp_path / "run", view=Witness(5, fail), trackers=(diary,))
    assert [line["step"] for line in metrics_of(tmp_path / "run") if line["kind"] == "step"] == list(range(6))
    assert [told["step"] for told in diary.told if told["kind"] == "step"] == list(range(6))
    assert diary.closed


def test_lost_records_are_not_made_up(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "a folder" / "[run]"
    with pytest.raises(InterruptedRunError, match=r"^stopped after step 4 of \d+ and saved$"):
        execute(small_settings(benchmark), out, view=Witness(3, lambda: signal.raise_signal(signal.SIGINT)))
    (out / "metrics.jsonl").unlink()
    with pytest.raises(SpclError, match=r"metrics.jsonl has 0 bytes, but had \d+ when the run was saved"):
        execute(small_settings(benchmark), out, resume=True)


def test_a_full_gpu_is_one_clear_line(benchmark: Path, tmp_path: Path) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of …")

    with pytest.raises(OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate 2.00 MiB; choose .* at once$"):
        execute(small_settings(benchmark), tmp_path / "run", view=Witness(3, full))


@pytest.mark.parametrize("steps_left", [0, 3])
def test_stopped_and_resumed_equals_uninterrupted(benchmark: Path, tmp_path: Path, steps_left: int) -> None:
    settings = small_settings(benchmark, scenario="class")
    whole = execute(settings, tmp_path / "whole")
    assert whole.steps is not None
    stop = Witness(whole.steps - 1 - steps_left, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(InterruptedRunError):
        execute(settings, tmp_path / "stopped", view=stop)
    resumed = execute(settings, tmp_path / "stopped", resume=True)
    assert without_times(resumed) == without_times(whole)
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "whole")


CHILD = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from spcl.cli import main
print("ready", flush=True)
sys.argv = ["spcl", *sys.argv[1:]]
main()
"""


def start_child(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def wait_for_steps(out: Path, count: int, child: subprocess.Popen[str]) -> None:
    """Wait until the run has saved something after `count` lines, or has ended."""
    deadline = time.monotonic() + 60
    metrics = out / "metrics.jsonl"
    while time.monotonic() < deadline and child.poll() is None:
        if metrics.exists() and len(metrics.read_bytes().splitlines()) >= count:
            return
        time.sleep(0.005)


def run_arguments(benchmark: Path, out: Path) -> list[object]:
    sets = ["tasks=3", "batch_size=2", "memory_budget=24", "threads=1", "checkpoint_seconds=0"]
    return ["run", "--benchmark", benchmark, "--device", "cpu", "--out", out, *(x for s in sets for x in ("--set", s))]


def test_killed_and_resumed_equals_uninterrupted(benchmark: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    reference = execute(small_settings(benchmark, batch_size=2, checkpoint_seconds=0.0), whole)
    arguments, kills = run_arguments(benchmark, broken), 0
    for lines in (5, 60, 110):
        child = start_child(*arguments)
        wait_for_steps(broken, lines, child)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        child.communicate()
        if RunFolder(broken).has_checkpoint():
            arguments = ["run", "--out", broken, "--resume"]
    child = start_child(*arguments)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert kills >= 2
    resumed = RunFolder(broken).read_result()
    assert resumed is not None
    assert without_times(resumed) == without_times(reference)
    assert metrics_of(broken) == metrics_of(whole)
    assert not RunFolder(broken).has_checkpoint()


def test_ctrl_c_saves_and_says_how_to_resume(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "a folder" / "[run]"
    child = start_child(*run_arguments(benchmark, out))
    wait_for_steps(out, 10, child)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    command = re.escape(shlex.join(["spcl", "run", "--out", str(out), "--resume"]))
    assert re.search(rf"^stopped after step \d+ .*: {command}$", output, re.MULTILINE)
    assert errors == ""
    assert RunFolder(out).has_checkpoint()


def test_second_process_on_one_folder_is_refused(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunFolder(out).locked():
        child = start_child(*run_arguments(benchmark, out))
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "another process is running" in errors


def test_unfinished_run_is_not_overwritten(benchmark: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoint.write_bytes(b"something")
    with pytest.raises(UnfinishedRunError, match="holds an unfinished run; resume it, or choose another folder"):
        execute(small_settings(benchmark), tmp_path)
    assert folder.checkpoint.read_bytes() == b"something"


def test_full_disk_ends_in_one_clear_line(benchmark: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
    command = [sys.executable, "-c", limit + CHILD, *map(str, run_arguments(benchmark, tmp_path / "run"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "File too large" in done.stderr


def test_folder_that_cannot_be_written_ends_in_one_clear_line(benchmark: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(SpclError, match="cannot write to"):
            execute(small_settings(benchmark), out)


def test_validation_never_touches_test_data(benchmark: Path) -> None:
    data = load_benchmark(str(benchmark), None)
    split = hold_out(data, 0.25)
    pool = {tuple(row) for row in data.train_x.tolist()}
    train, held = ({tuple(row) for row in part.tolist()} for part in (split.train_x, split.test_x))
    assert train | held == pool
    assert not train & held
    assert split.test_y.bincount().tolist() == [10] * 6


@pytest.mark.parametrize("paradigm", ["parallel", "joint", "serial"])
def test_paradigms_differ_in_time_only(benchmark: Path, tmp_path: Path, paradigm: str) -> None:
    settings = small_settings(benchmark, paradigm=paradigm)
    problem = make_problem(settings, torch.device("cpu"))
    starts = [first for first, _ in problem.configuration.timeline.spans]
    assert (
        problem.configuration.label_set
        == make_problem(small_settings(benchmark), torch.device("cpu")).configuration.label_set
    )
    assert (starts == [0, 0, 0]) == (paradigm == "joint")
    assert (starts == [0, 10, 20]) == (paradigm == "serial")
    assert execute(settings, tmp_path / "run").steps == len(problem.stream)


@pytest.mark.parametrize("policy", ["balanced", "reservoir"])
def test_memory_budget_is_kept(benchmark: Path, tmp_path: Path, policy: str) -> None:
    result = execute(small_settings(benchmark, memory=policy, memory_budget=7), tmp_path / "run")
    assert result.accuracy > 50.0


def test_unknown_settings_suggest_the_nearest(benchmark: Path) -> None:
    with pytest.raises(SpclError, match="did you mean 'batch_size'"):
        small_settings(benchmark, batchsize=3)
    with pytest.raises(SpclError, match="did you mean 'sigma'"):
        small_settings(benchmark, method={"sigmma": 3.0})
    with pytest.raises(SpclError, match="did you mean 'soro'"):
        small_settings(benchmark, method={"name": "sooro"})
    with pytest.raises(SpclError, match="learning_rate = -1"):
        small_settings(benchmark, learning_rate=-1)


def test_published_protocol_that_does_not_fit_says_by_how_much_and_can_be_fitted(tmp_path: Path) -> None:
    emnist = SHARED / "protocols" / "ps-emnist.json"
    if not emnist.exists():
        pytest.skip("the published protocols are not here")
    with pytest.raises(SpclError, match=r"has 910 steps and needs \d+ \(\d+ too many\)"):
        make_problem(resolve_settings({"benchmark": "ps-glyphs", "protocol": str(emnist)}), torch.device("cpu"))
    fitted = resolve_settings({"benchmark": "ps-glyphs", "protocol": str(emnist), "fit": True})
    assert make_problem(fitted, torch.device("cpu")).configuration.label_set[0][0] == 21


def test_glyphs_run_is_seconds(tmp_path: Path) -> None:
    result = execute(
        resolve_settings({"benchmark": "ps-glyphs", "method": {"name": "er"}, "threads": 1}), tmp_path / "run"
    )
    assert 40.0 < result.accuracy < 90.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8e6
