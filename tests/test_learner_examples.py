"""The examples run and show what they promise."""

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spcl.checkpoint import read_checkpoint
from spcl.cli.app import app

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_own_data_is_learnt_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / "own_data.py"
    runpy.run_path(str(path), run_name="__main__")
    found = {name: float(right) for name, right in re.findall(r"(\w+): ([\d.]+)%", capsys.readouterr().out)}
    assert found["direction"] > 90
    assert found["distance"] > 70
    lines = path.read_text().split("\nbackbone = ")[1].rstrip().splitlines()
    assert len(lines) == 10


def test_live_sources_join_late_die_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["live_multi_source.py", "--steps", "60", "--out", str(picture)])
    runpy.run_path(str(EXAMPLES / "live_multi_source.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "source 'load' failed: cable disconnected" in printed
    rows = {
        name: (int(count), int(failures)) for name, count, failures in re.findall(r"(\w+) +│ (\d+) +│ (\d)", printed)
    }
    assert set(rows) == {"vibration", "load", "acoustic"}
    assert rows["load"][1] == 1
    assert rows["load"][0] > 60 // 20, "it did not come back"
    assert rows["vibration"][0] > rows["acoustic"][0] > 0
    assert len(re.findall(r"│ \d+\.\d s ago", printed)) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


SHORT = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in ("demo", "live_multi_source", "serve_demo")]


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_examples_are_short_and_listed(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    assert f"(examples/{path.name})" in (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")


def printed_by(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_own_method_helps_the_task_with_small_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    found = dict(re.findall(r"(\w+)\(.*\): ([\d.]+)%", printed_by("own_method", capsys)))
    assert float(found["Balanced"]) > float(found["ER"])


def test_regression_and_multilabel_sources_are_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("regression_and_multilabel", capsys)
    found = {name: float(score) for name, score in re.findall(r"(\w+): ([\d.]+) ", printed)}
    assert found["quadrant"] > 0.9
    assert found["radius"] < 0.05
    assert found["tags"] < 0.3


def test_schedule_and_clipping_resume_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("schedule_and_clipping", capsys)
    assert "identical after loading: True" in printed
    assert float(re.findall(r"sum: ([\d.]+)%", printed)[0]) > 95


def test_live_training_resumes_after_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["live_resume.py", str(tmp_path / "checkpoint")])
    printed = printed_by("live_resume", capsys)
    assert "crashed: power cut" in printed
    assert re.search(r"resumed after \d+ steps", printed)
    assert "finished after" in printed
    delivered = read_checkpoint(tmp_path / "checkpoint")["sources"]["stream"]["delivered"]
    assert delivered == {"left": 150, "upper": 100}


def test_own_backbone_learns_from_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = dict(re.findall(r"(\w+): ([\d.]+) %", printed_by("own_text_backbone", capsys)))
    assert float(found["topic"]) > 90
    assert float(found["urgency"]) > 80


def test_a_hugging_face_model_is_a_backbone(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    printed = printed_by("hugging_face", capsys)
    assert float(re.findall(r"length: ([\d.]+)%", printed)[0]) > 95
    error, variance = (float(number) for number in re.findall(r" (0\.\d{4})", printed))
    assert error < 0.6 * variance


def commands_of(name: str) -> list[list[str]]:
    """The command lines in the docstring of an example."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""
    lines = re.findall(r"^    spcl ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [shlex.split(line.replace("\\\n", " ")) for line in lines]


@pytest.mark.parametrize("name", ["own_method", "own_text_backbone", "hugging_face"])
def test_the_command_lines_of_examples_work_as_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "hugging_face":
        pytest.importorskip("transformers")
    (command,) = commands_of(name)
    monkeypatch.chdir(EXAMPLES.parent)
    command[command.index("--out") + 1] = str(tmp_path / "run")
    smaller = ["--set", "data.samples=200"] if "notes" in command else ["--set", "tasks=2", "--set", "evaluate=ended"]
    result = CliRunner().invoke(app, [*command, *smaller, "--set", "threads=1", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "model.safetensors").exists()
    if name == "own_text_backbone":
        pytest.importorskip("onnx")
        arguments = ["export", str(tmp_path / "run"), "--task", "topic", "--out", str(tmp_path / "model.onnx")]
        exported = CliRunner().invoke(app, arguments)  # of inputs that are a dict
        assert exported.exit_code == 0, exported.output
