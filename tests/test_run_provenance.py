"""A run that goes on is the run that was saved: other settings and other data are refused, and nothing is lost."""

import json
import shutil
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
from spcl.runs import InterruptedRunError, RunFolder, execute, load_benchmark
from spcl.runs.provenance import MAX_BYTES, fingerprint


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
