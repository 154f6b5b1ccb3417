"""``spcl predict``, ``evaluate`` and ``export``, and which runs keep a model."""

import csv
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from spcl.cli.app import app
from spcl.errors import SpclError, install_command
from tiny_runs import tiny_data
from trained_runs import Trained, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    base = tmp_path_factory.mktemp("trained")
    return {scenario: train(base, scenario, scenario=scenario) for scenario in ("task", "class")}


@pytest.fixture(scope="module")
def files(runs: dict[str, Trained], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Test samples as pictures, one for each class, and as arrays."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "pictures" / "more").mkdir(parents=True)
    trained = runs["class"]
    for i, name in enumerate(sorted(set(trained.y))):
        suffix, place = (".png", ".") if i < 4 else (".bmp", "more")
        pixels = trained.x[list(trained.y).index(name), 0]
        Image.fromarray(pixels).save(folder / "pictures" / place / f"{name}{suffix}")
    np.save(folder / "x.npy", trained.x)
    np.savez(folder / "x.npz", x=trained.x[:4, 0], y=trained.y[:4])
    (folder / "broken.png").write_bytes((folder / "pictures" / "ant.png").read_bytes()[:50])
    np.save(folder / "wide.npy", np.zeros((2, 1, 18, 20), np.uint8))
    np.save(folder / "floats.npy", np.zeros((2, 1, 18, 18)))
    np.savez(folder / "other.npz", images=trained.x)
    (folder / "damaged.npz").write_bytes((folder / "x.npz").read_bytes()[:100])
    return folder


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def rows(*words: object) -> list[dict[str, Any]]:
    outcome = invoke("predict", *words, "--format", "json", "--device", "cpu")
    assert outcome.exit_code == 0, outcome.output
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def error_of(*words: object) -> str:
    outcome = invoke(*words)
    assert isinstance(outcome.exception, SpclError), outcome.output
    return str(outcome.exception)


def test_predictions_for_arrays_are_those_of_the_learner(runs: dict[str, Trained], files: Path) -> None:
    trained = runs["class"]
    found = rows(trained.path, files / "x.npy")
    assert [row["index"] for row in found] == list(range(len(trained.x)))
    probabilities, indices = trained.learner.predict_proba(trained.x).max(dim=1)
    assert [row["probability"] for row in found] == pytest.approx(probabilities.tolist(), rel=1e-5)
    assert [row["task"] for row in found] == [trained.learner.classes[index][0] for index in indices]
    right = np.mean([row["class"] for row in found] == trained.y)
    assert right > 0.9  # names and not labels alone are right
    task = rows(runs["task"].path, files / "x.npz", "--task", "task-1")
    logits = runs["task"].learner.logits(trained.x[:4], "task-1")
    assert [row["probability"] for row in task] == pytest.approx(logits.softmax(1).amax(1).tolist(), rel=1e-5)
    assert {row["task"] for row in task} == {"task-1"}


def test_pictures_are_predicted_as_their_pixels_are(runs: dict[str, Trained], files: Path) -> None:
    trained = runs["class"]
    found = rows(trained.path, files / "pictures")
    assert [Path(row["file"]).stem for row in found] == ["ant", "bee", "cat", "dog", "eel", "fox"]
    assert all(row["index"] is None for row in found)
    chosen = [list(trained.y).index(Path(row["file"]).stem) for row in found]
    expected = trained.learner.predict_proba(torch.from_numpy(trained.x[chosen])).amax(1).tolist()
    assert [row["probability"] for row in found] == pytest.approx(expected, rel=1e-5)


def test_a_colour_picture_of_another_size_is_converted_as_training_data_is(
    runs: dict[str, Trained], files: Path, tmp_path: Path
) -> None:
    picture = Image.open(files / "pictures" / "cat.png").convert("RGB").resize((36, 54))
    picture.save(tmp_path / "large.png")
    small = np.asarray(picture.convert("L").resize((18, 18), Image.Resampling.BILINEAR))
    (row,) = rows(runs["class"].path, tmp_path / "large.png")
    expected = runs["class"].learner.predict_proba(small[None, None].copy()).max().item()
    assert row["probability"] == pytest.approx(expected, rel=1e-5)


def test_csv_and_table_show_the_same_as_json(runs: dict[str, Trained], files: Path) -> None:
    words = [runs["class"].path, files / "pictures", "--top", "3"]
    expected = rows(*words)
    assert [row["rank"] for row in expected] == [1, 2, 3] * 6
    for three in zip(*[iter(expected)] * 3, strict=True):
        assert three[0]["probability"] >= three[1]["probability"] >= three[2]["probability"]
    written = list(csv.DictReader(io.StringIO(invoke("predict", *words, "--format", "csv").stdout)))
    assert [(row["file"], row["class"]) for row in written] == [(row["file"], row["class"]) for row in expected]
    assert [float(row["probability"]) for row in written] == [row["probability"] for row in expected]
    table = invoke("predict", *words).stdout.splitlines()
    assert table[0].split() == ["file", "task", "rank", "class", "probability"]
    assert table[1].split()[1:4] == [expected[0]["task"], "1", expected[0]["class"]]


def test_faulty_files_are_named_and_the_others_predicted(runs: dict[str, Trained], files: Path, tmp_path: Path) -> None:
    names = ["broken.png", "wide.npy", "floats.npy", "other.npz", "damaged.npz", "absent.jpg"]
    words = ["predict", runs["class"].path, *(files / name for name in names), files / "x.npz", tmp_path]
    outcome = invoke(*words, "--format", "json")
    assert outcome.exit_code == 1
    assert [json.loads(line)["index"] for line in outcome.stdout.splitlines()] == [0, 1, 2, 3]
    said = outcome.stderr
    assert said.count("error: ") == len(names) + 1
    assert "Traceback" not in said
    for text in (
        "broken.png: expected a picture",
        "wide.npy: x has the shape (2, 1, 18, 20), expected (N, 1, 18, 18)",
        "floats.npy: x holds float64, expected uint8; convert it with astype('uint8')",
        "other.npz must hold the arrays x, but it has no x",
        "damaged.npz cannot be read: it is damaged",
        "absent.jpg cannot be read: No such file or directory",
        f"{tmp_path}: expected a folder of pictures, found none in it",
    ):
        assert text in said


def test_features_are_predicted_from_arrays_and_not_from_pictures(benchmark: Path, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["run", "--benchmark", benchmark, "--scenario", "class", "--out", out, "--device", "cpu"]
    assert invoke(*words, "--set", "tasks=3", "--set", "batch_size=8").exit_code == 0
    with np.load(benchmark) as arrays:
        np.save(tmp_path / "x.npy", arrays["test_x"].astype(np.float64))
        labels = arrays["test_y"]
    found = rows(out, tmp_path / "x.npy")
    accuracy = json.loads((out / "result.json").read_text())["accuracy"]
    assert 100 * np.mean([int(row["class"]) for row in found] == labels) == pytest.approx(accuracy)
    outcome = invoke("predict", out, files / "pictures" / "ant.png")
    assert outcome.exit_code == 1
    assert "trained on samples of float32 8, not on pictures; give an .npy or .npz file" in outcome.stderr


def test_a_task_is_asked_for_with_the_tasks_and_their_classes(runs: dict[str, Trained], files: Path) -> None:
    said = error_of("predict", runs["task"].path, files / "x.npy")
    assert said.endswith(" (--task)")
    assert "one of task-0 (" in said
    assert all(name in said for name in ("task-1", "ant", "bee", "cat", "dog", "eel", "fox"))


def test_an_unfinished_run_is_answered_with_the_command_that_finishes_it(
    runs: dict[str, Trained], files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "my run"
    out.mkdir()
    (out / "settings.json").write_bytes((runs["task"].path / "settings.json").read_bytes())
    for command in (["predict", out, files / "x.npy"], ["evaluate", out], ["export", out, "--out", tmp_path / "m.pt2"]):
        assert error_of(*command).endswith(f"is not complete; resume it first (spcl run --out '{out}' --resume)")


def test_evaluate_prints_recorded_and_new_accuracies(runs: dict[str, Trained]) -> None:
    trained = runs["task"]
    result = json.loads((trained.path / "result.json").read_text())
    lines = [line.split() for line in invoke("evaluate", trained.path, "--device", "cpu").stdout.splitlines()]
    assert lines[0] == ["task", "metric", "recorded", "%", "now", "%"]
    for task, numbers in result["tasks"].items():
        assert [task, "accuracy", *[f"{numbers['final']:.2f}"] * 2] in lines
    assert lines[-1] == ["A", *[f"{result['accuracy']:.2f}"] * 2]


def test_export_names_the_files_and_refuses_unknown_formats(runs: dict[str, Trained], tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    outcome = invoke("export", runs["task"].path, "--task", "task-0", "--out", file)
    assert outcome.stdout.splitlines()[0] == f"wrote {file} and {file}.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt2", "model.pt2.json"]
    said = error_of("export", runs["class"].path, "--out", tmp_path / "model.pth")
    assert said.endswith("model.pth; give a file that ends in .pt2 or .onnx")
    assert "cannot write to" in error_of("export", runs["class"].path, "--out", tmp_path / "absent" / "m.pt2")


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_export_to_a_full_disk_is_one_error_and_leaves_nothing(
    runs: dict[str, Trained], tmp_path: Path, suffix: str
) -> None:
    """In a process of its own, which PyTorch would end where it writes to the file itself."""
    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
    file = tmp_path / f"model{suffix}"
    words = [sys.executable, "-m", "spcl", "export", runs["class"].path, "--out", file]
    outcome = subprocess.run(
        words,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 1, outcome.stderr
    assert "File too large" in outcome.stderr
    assert f"error: cannot write to {tmp_path}" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_a_model_is_not_exported_without_its_description(runs: dict[str, Trained], tmp_path: Path) -> None:
    (tmp_path / "model.pt2.json").mkdir()
    assert "cannot write to" in error_of("export", runs["class"].path, "--out", tmp_path / "model.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2.json"]


def test_onnx_without_its_packages_is_answered_with_how_to_install_them(
    runs: dict[str, Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    said = error_of("export", runs["class"].path, "--out", tmp_path / "model.onnx")
    assert said.endswith(f"run: {install_command('onnx')}")
    assert not list(tmp_path.iterdir())


def test_tuning_keeps_no_models(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    words = ["tune", "--benchmark", tiny_data(tmp_path), "--search", "learning_rate=log:1e-4:1e-2", "--trials", "1"]
    words += ["--device", "cpu", *(word for name in ("tasks=2", "backbone=mlp") for word in ("--set", name))]
    outcome = invoke(*words, "--out", tmp_path / "tuning")
    assert outcome.exit_code == 0, outcome.output
    assert "keep_model" not in outcome.output  # not in the command that repeats the best run either
    assert not list(tmp_path.rglob("model.safetensors"))
