"""The folder of a run: its files, its environment, and the settings and data it belongs to."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from small_benchmark import StopAtStep, small_settings, write_benchmark
from spcl import checkpoint
from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.cli.app import app
from spcl.data import ImageData
from spcl.errors import SpclError
from spcl.runs import InterruptedRunError, RunFolder, execute, load_benchmark, resume_settings
from spcl.runs.records import MAX_BYTES, _git_commit, fingerprint

# -- files


def test_all_that_saving_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(2):
        write_checkpoint(folder.checkpoint, {"step": step})
    killed = tmp_path / f".{folder.checkpoint.name}.0123abcd.partial"
    killed.write_bytes(b"half a checkpoint")
    copy = tmp_path / f"{folder.checkpoint.name}.my-copy"
    copy.write_bytes(folder.checkpoint.read_bytes())
    folder.remove_checkpoints()
    assert list(tmp_path.iterdir()) == [copy]
    assert not folder.has_checkpoint()
    folder.remove_checkpoints()


def test_what_killed_writers_left_is_removed_by_who_locks_the_folder(tmp_path: Path) -> None:
    left = [tmp_path / f".{name}.0123abcd.partial" for name in ("settings.json", "model.safetensors", "result.json")]
    own = tmp_path / "notes.partial"
    for file in (*left, own):
        file.touch()
    with RunFolder(tmp_path).locked():
        assert not any(file.exists() for file in left)
    assert own.exists()


@pytest.mark.parametrize("kept", ["checkpoint.safetensors", "checkpoint.safetensors.previous"])
def test_the_previous_checkpoint_is_one_to_resume_from(tmp_path: Path, kept: str) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.has_checkpoint()
    (tmp_path / kept).touch()
    assert folder.has_checkpoint()


def test_a_checkpoint_on_another_disk_has_its_previous_one_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.checkpoint.symlink_to(tmp_path / "elsewhere")
    for step in range(2):
        write_checkpoint(folder.checkpoint, {"step": step})
    (tmp_path / "elsewhere").unlink()
    assert folder.has_checkpoint()
    folder.remove_checkpoints()
    assert not folder.has_checkpoint()


# -- environment


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout


def test_the_commit_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert _git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "v1")
    _git_commit.cache_clear()
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert _git_commit(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    _git_commit.cache_clear()
    assert _git_commit(tmp_path) == f"{commit}-dirty"


# -- what a run was started with


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return write_benchmark(tmp_path / "own.npz")


@pytest.fixture
def stopped(own: Path, tmp_path: Path) -> Path:
    with pytest.raises(InterruptedRunError):
        execute(small_settings(own), tmp_path / "run", view=StopAtStep(5))
    return tmp_path / "run"


def resume(out: Path) -> Any:
    return CliRunner().invoke(app, ["run", "--out", str(out), "--resume"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def outcome(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return {name: value for name, value in result.items() if name not in ("benchmark", "seconds", "environment")}


@pytest.mark.parametrize("changed", ["x", "y", "test_x", "test_y"])
def test_changed_data_is_refused_until_it_is_put_back(own: Path, stopped: Path, tmp_path: Path, changed: str) -> None:
    execute(small_settings(own), tmp_path / "whole")
    original = own.read_bytes()
    arrays = dict(np.load(own))
    np.savez(own, **(arrays | {changed: np.flip(arrays[changed], axis=0)}))
    before = contents(stopped)
    refused = resume(stopped)
    assert isinstance(refused.exception, SpclError)
    assert f"the data of {own} has changed since the run in {stopped} was saved" in str(refused.exception)
    assert "put the data back to resume, or start again in another folder (--out)" in str(refused.exception)
    assert contents(stopped) == before
    own.write_bytes(original)
    assert resume(stopped).exit_code == 0
    assert outcome(stopped) == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenario": "class"}, "with scenario = task, but its settings.json now says class; set it back"),
        ({"learning_rate": 0.5}, "with learning_rate = 0.001, but its settings.json now says 0.5; set it back"),
        ({"backbone": "cnn"}, "with backbone = mlp, but its settings.json now says cnn"),
        ({"method": {"name": "er"}}, "with method.name = soro, but its settings.json now says er"),
        ({"batch_size": 9}, "with batch_size = 8, but its settings.json now says 9"),
    ],
)
def test_edited_settings_are_refused(stopped: Path, changes: dict[str, Any], message: str) -> None:
    edit(stopped / "settings.json", **changes)
    before = contents(stopped)
    refused = resume(stopped)
    assert isinstance(refused.exception, SpclError)
    assert f"the run in {stopped} was saved {message}" in str(refused.exception)
    assert contents(stopped) == before


def test_other_settings_than_the_folders_are_refused_and_leave_it_as_it_is(own: Path, stopped: Path) -> None:
    before = contents(stopped)
    with pytest.raises(SpclError, match=r"holds a run with learning_rate = 0\.001, not 0\.5"):
        execute(small_settings(own, learning_rate=0.5), stopped, resume=True)
    assert contents(stopped) == before


def test_a_run_may_move_with_its_data_and_be_recorded_otherwise(own: Path, stopped: Path, tmp_path: Path) -> None:
    execute(small_settings(own), tmp_path / "whole")
    (tmp_path / "elsewhere").mkdir()
    data, out = shutil.move(own, tmp_path / "elsewhere" / own.name), shutil.move(stopped, tmp_path / "elsewhere/run")
    edit(out / "settings.json", benchmark=str(data), checkpoint_seconds=1.0, device="auto", threads=None)
    resumed = resume(out)
    assert resumed.exit_code == 0, resumed.exception
    assert outcome(out) == outcome(tmp_path / "whole")


def test_a_checkpoint_from_before_this_was_kept_goes_on(own: Path, stopped: Path, tmp_path: Path) -> None:
    execute(small_settings(own), tmp_path / "whole")
    path = RunFolder(stopped).checkpoint
    state = read_checkpoint(path)
    del state["sources"]["origin"]
    write_checkpoint(path, state)
    assert resume(stopped).exit_code == 0
    assert outcome(stopped) == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("progress", {"latest": None}),
        ("progress", {"at_end": {"task-0": "high"}}),
        ("progress", {"metrics_position": "end"}),
        ("progress", {"metrics_position": 2.5}),
        ("stream", {"position": 2.5}),
        ("stream", None),
        ("origin", {"settings": 3}),
    ],
)
def test_wrong_content_of_a_checkpoint_is_refused(own: Path, stopped: Path, source: str, wrong: Any) -> None:
    path = stopped / "checkpoint.safetensors"
    state = read_checkpoint(path)
    state["sources"][source] = wrong if wrong is None else state["sources"][source] | wrong
    write_checkpoint(path, state)
    with pytest.raises(SpclError):
        execute(resume_settings(stopped), stopped, resume=True)


def test_resuming_reads_the_checkpoint_once(own: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr(checkpoint, "safe_open", counted)
    execute(small_settings(own), stopped, resume=True)
    assert opened == [RunFolder(stopped).checkpoint]


def test_a_fingerprint_is_of_shapes_labels_and_samples_and_of_no_name(own: Path) -> None:
    data = load_benchmark(str(own), None)
    assert fingerprint(replace(data, name="other", train_x=data.train_x.clone())) == fingerprint(data)
    labels = data.train_y.clone()
    labels[-1] = 0
    samples = data.train_x.clone()
    samples[0, 0] += 1
    others = [
        replace(data, train_y=labels),
        replace(data, train_x=samples),
        replace(data, train_x=data.train_x[1:], train_y=data.train_y[1:]),
        replace(data, train_x=data.train_x.reshape(-1, 4, 2), test_x=data.test_x.reshape(-1, 4, 2)),
        replace(data, train_x=data.train_x.double(), test_x=data.test_x.double()),
    ]
    assert len({fingerprint(one) for one in [data, *others]}) == 1 + len(others)


def test_a_fingerprint_of_mapped_data_reads_only_a_part_of_it(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    if not Path("/proc/self/statm").exists():
        pytest.skip("only Linux says how much of a mapped file was read")
    count, side = 256, 1024
    size = count * side**2
    with (tmp_path / "images").open("wb") as file:
        file.truncate(size)
    mapped = torch.from_file(str(tmp_path / "images"), shared=True, size=size, dtype=torch.uint8)
    images, labels = mapped.reshape(count, 1, side, side), torch.arange(count) % 2
    data = ImageData("mapped", images, labels, images[:1], labels[:1], ("a", "b"))
    before = resident_bytes()
    fingerprint(data)
    assert size > 16 * MAX_BYTES
    assert resident_bytes() - before < size / 4
