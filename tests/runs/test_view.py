"""What a person sees of a run, on a terminal and in a log; trackers; the commands around it."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from _runs import spcl
from small_benchmark import small_settings, write_benchmark
from spcl.cli.app import app
from spcl.errors import DataError, SpclError
from spcl.learner import StepReport
from spcl.runs import (
    DataSummary,
    LiveView,
    PlainView,
    execute,
    load_benchmark,
    make_problem,
    resolve_settings,
)
from spcl.runs.build import make_backbone, pick_device
from spcl.runs.view import REFRESH_SECONDS
from spcl.trackers import TRACKERS

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmark(tmp_path_factory.mktemp("data") / "clusters.npz")


def seen(view_type: type[LiveView] | type[PlainView], benchmark: Path, out: Path, terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, highlight=False)
    execute(small_settings(benchmark, scenario="class"), out, view=view_type(console))
    return text.getvalue()


def test_a_log_has_plain_lines(benchmark: Path, tmp_path: Path) -> None:
    lines = seen(PlainView, benchmark, tmp_path / "run", terminal=False).splitlines()
    assert lines[0].startswith("soro on ")
    assert "class-incremental" in lines[0]
    assert any("step" in line and "κ" in line and "task-0" in line and "%" in line for line in lines[1:])
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert lines[-1].startswith(
        f"class-incremental: accuracy {result['accuracy']:.2f} %, anytime {result['anytime']:.2f} %, F "
    )
    assert "\x1b" not in "".join(lines)


def test_a_terminal_has_a_live_picture_and_a_table_at_the_end(benchmark: Path, tmp_path: Path) -> None:
    text = seen(LiveView, benchmark, tmp_path / "run", terminal=True)
    result = json.loads((tmp_path / "run/result.json").read_text())
    for word in ("training", "task-0", "memory", "█", "κ before → after", "steps/s", "accuracy at the end"):
        assert word in text
    for values in result["tasks"].values():
        assert f"{values['final']:.2f} %" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_of_many_tasks_mean_and_worst_are_shown(tmp_path: Path, terminal: bool) -> None:
    benchmark = write_benchmark(tmp_path / "many.npz", classes=24)
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, height=30, highlight=False)
    view = LiveView(console) if terminal else PlainView(console)
    result = execute(small_settings(benchmark, tasks=12), tmp_path / "run", view=view)
    if terminal:
        picture, _, _ = text.getvalue().partition("steps/s")
        assert "4 more" in picture
        assert "task-7" in picture
        assert "task-8" not in picture
        return
    lines = text.getvalue().splitlines()
    worst = min(result.tasks, key=lambda name: result.tasks[name].final)
    assert f"mean {result.accuracy:.1f} % of 12, worst {result.worst:.1f} % ({worst})" in lines[-2]
    assert max(map(len, lines[1:])) < 120


class SlowTerminal(io.StringIO):
    """Takes a while to show something, and counts how often that happens."""

    shown = 0

    def write(self, text: str) -> int:
        self.shown += 1
        time.sleep(0.02)
        return super().write(text)


def test_a_slow_terminal_is_drawn_on_less_often(benchmark: Path) -> None:
    terminal = SlowTerminal()
    settings = small_settings(benchmark)
    view = LiveView(Console(file=terminal, force_terminal=True, width=100))
    view.begin(settings, make_problem(settings, torch.device("cpu")), 0)
    report = StepReport(0, {"task-0": 1.0}, {}, None, None, {}, {}, 0)
    view.step(0, report, {})
    shown, end = terminal.shown, time.monotonic() + 2 * REFRESH_SECONDS
    while time.monotonic() < end:
        view.step(1, report, {})
    assert terminal.shown == shown > 0
    view.close()


def test_tensorboard_gets_every_number(benchmark: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = small_settings(benchmark, trackers=["tensorboard"])
    result = execute(settings, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert events.Scalars("A")[-1].value == pytest.approx(result.accuracy, rel=1e-5)
    assert events.Scalars("F")[-1].value == pytest.approx(result.forgetting, rel=1e-5)
    assert any("hparams" in name for name in events.summary_metadata)
    names = events.Tags()["scalars"]
    assert {"losses/task-0", "losses/memory", "weights/task-0", "before/condition_number"} <= set(names)
    assert events.Scalars("accuracy/task-2")[-1].value == pytest.approx(result.tasks["task-2"].final, rel=1e-5)


def test_a_tracker_that_is_not_installed_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(SpclError, match=r"pip install .*\[wandb\]"):
        TRACKERS.make({"name": "wandb", "project": "x"}, tmp_path, {})


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "runs/[none] :a:"],
        ["run", "--method", "[/soro]", "--out", "x"],
        ["tune", "--search", "lr:a:b", "--out", "x"],
    ],
)
def test_text_that_looks_like_markup_is_shown_as_it_is(arguments: list[str], tmp_path: Path) -> None:
    told = spcl(*arguments, folder=tmp_path)
    assert told.returncode == 1
    assert told.stderr.startswith("error: ")
    assert arguments[2 if arguments[0] != "table" else 1] in told.stderr


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_run_command_with_settings_file_and_assignments(benchmark: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("batch_size: 16\ntasks: 3\nmethod: {name: er}\n")
    arguments: list[object] = [
        "run",
        "--benchmark",
        benchmark,
        "--settings",
        tmp_path / "settings.yaml",
        "--set",
        "batch_size=8",
    ]
    outcome = invoke(
        *arguments, "--scenario", "class", "--seed", 2, "--device", "cpu", "--tensorboard", "--out", tmp_path / "x"
    )
    assert outcome.exit_code == 0, outcome.output
    settings = json.loads((tmp_path / "x/settings.json").read_text())
    assert (settings["batch_size"], settings["method"]["name"], settings["scenario"], settings["seed"]) == (
        8,
        "er",
        "class",
        2,
    )
    assert list((tmp_path / "x/tensorboard").iterdir())
    again = invoke("run", "--settings", tmp_path / "x/settings.json", "--out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    mine, theirs = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("x", "again"))
    assert mine["accuracy"] == theirs["accuracy"]


def test_resume_takes_no_other_settings_and_needs_a_run(benchmark: Path, tmp_path: Path) -> None:
    outcome = invoke("run", "--out", tmp_path / "none", "--resume")
    assert "there is no run" in str(outcome.exception)
    assert "(without --resume)" in str(outcome.exception)
    execute(small_settings(benchmark), tmp_path / "run")
    outcome = invoke("run", "--out", tmp_path / "run", "--resume", "--seed", 1)
    assert "give no others (found seed)" in str(outcome.exception)
    assert invoke("run", "--out", tmp_path / "run", "--resume").exit_code == 0


@pytest.mark.parametrize("assignments", [[], ["method.sigma=3"]])
def test_a_method_may_be_given_by_its_name_alone(benchmark: Path, tmp_path: Path, assignments: list[str]) -> None:
    (tmp_path / "settings.yaml").write_text("batch_size: 8\ntasks: 3\ndevice: cpu\nmethod: soro+dbt\n")
    words = [word for assignment in assignments for word in ("--set", assignment)]
    file = ["--settings", tmp_path / "settings.yaml"]
    outcome = invoke("run", "--benchmark", benchmark, *file, *words, "--out", tmp_path / "x")
    assert outcome.exit_code == 0, outcome.output
    method = json.loads((tmp_path / "x/settings.json").read_text())["method"]
    assert (method["name"], method["sigma"]) == ("soro+dbt", 3 if assignments else resolve_sigma("soro+dbt"))


def resolve_sigma(method: str) -> Any:
    return resolve_settings({"method": {"name": method}}).method["sigma"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("seed: 1\ntasks: 3\nseed: 2\n", "'seed' twice, in lines 1 and 3"),
        ("method:\n  name: soro\n  sigma: 1\n  sigma: 2\n", "'sigma' twice, in lines 3 and 4"),
        ('{"seed": 1, "seed": 1}', "'seed' twice, in lines 1 and 1"),
    ],
)
def test_a_setting_that_is_given_twice_is_an_error(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    outcome = invoke("run", "--settings", file, "--out", tmp_path / "x")
    assert str(outcome.exception) == f"the settings {file} give {found}; keep one of them"


@pytest.mark.parametrize("text", ["- a list", "benchmark: [", "\x00"])
def test_a_bad_settings_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    outcome = invoke("run", "--settings", tmp_path / "bad.yaml", "--out", tmp_path / "x")
    assert isinstance(outcome.exception, SpclError)
    assert "bad.yaml" in str(outcome.exception)


def test_timeline_command_draws_every_task_and_memory(benchmark: Path) -> None:
    outcome = invoke("timeline", "--benchmark", benchmark, "--set", "tasks=3", "--set", "batch_size=8")
    assert outcome.exit_code == 0, outcome.output
    for word in ("task-0 (2 classes)", "task-2 (2 classes)", "memory", "█"):
        assert word in outcome.output


def test_a_folder_of_pictures_is_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for label, brightness in {"dark": 40, "grey": 120, "light": 200, "white": 250}.items():
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(20):
            pixels = np.clip(rng.normal(brightness, 10, (32, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / label / f"{number}.png")
    small = {"tasks": 2, "batch_size": 4, "device": "cpu", "threads": 1}
    settings = resolve_settings({"benchmark": str(tmp_path / "pictures"), "method": {"name": "er"}}, small)
    assert settings.backbone == "cnn"
    result = execute(settings, tmp_path / "run")
    assert result.data == DataSummary(name="pictures", train=64, test=16, shape=(3, 32, 32), classes=4)
    assert json.loads((tmp_path / "run/result.json").read_text())["data"] == {
        "name": "pictures",
        "train": 64,
        "test": 16,
        "shape": [3, 32, 32],
        "classes": 4,
    }
    assert [sum(map(sum, table)) for table in result.confusion.values()] == [8, 8]


def test_bad_own_data_and_devices_are_named(tmp_path: Path, benchmark: Path) -> None:
    np.savez(tmp_path / "wrong.npz", images=np.zeros(3))
    with pytest.raises(DataError, match="must hold arrays x and y"):
        load_benchmark(str(tmp_path / "wrong.npz"), None)
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match=r"cannot read .*broken\.npz"):
        load_benchmark(str(tmp_path / "broken.npz"), None)
    with pytest.raises(SpclError, match="there is no device 'nonsense'"):
        pick_device("nonsense")
    settings = small_settings(benchmark, backbone="resnet18")
    with pytest.raises(SpclError, match="needs images"):
        make_backbone(settings, load_benchmark(str(benchmark), None), torch.device("cpu"))


def test_published_cifar_protocol_runs_as_it_is_on_complete_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (SHARED / "data").exists():
        pytest.skip("the published protocols and data are not here")

    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    unpack = [sys.executable, str(SHARED / "data/unpack.py"), str(tmp_path / "data"), "cifar100"]
    subprocess.run(unpack, check=True, capture_output=True)
    for index in range(9):
        chosen = {"config": index, "protocol": str(SHARED / "protocols/ps-cifar100.json")}
        settings = resolve_settings({"benchmark": "ps-cifar100", "data_dir": str(tmp_path / "data")}, chosen)
        problem = make_problem(settings, torch.device("cpu"))
        assert sum(len(x) for x, _ in problem.tests.values()) == 10_000
        assert len(problem.stream) == problem.configuration.timeline.steps
    x, y = problem.stream[0].batches["task-0"]
    assert x.shape == (128, 3, 32, 32)
    assert x.dtype == torch.uint8
    assert int(y.max()) < 10
