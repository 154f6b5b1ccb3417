"""Archives that ``results/pack.py`` makes: figures are drawn from them, and published protocols are not in them."""

import json
import runpy
import shutil
import tarfile
from pathlib import Path

import pytest

from spcl.results.figures import FIGURES, draw_figure
from spcl.results.records import read_runs
from tiny_runs import entries, result, two_task_runs

PACK = Path(__file__).resolve().parents[2] / "results/pack.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_task_runs(tmp_path_factory.getbasetemp())


def repacked(folder: Path, where: Path, monkeypatch: pytest.MonkeyPatch, *every: str) -> Path:
    """Pack the runs and return the folder that they are unpacked to."""
    monkeypatch.setattr("sys.argv", ["pack.py", str(folder), str(where / "records.tar.gz"), *every])
    runpy.run_path(str(PACK), run_name="__main__")
    with tarfile.open(where / "records.tar.gz") as archive:
        archive.extractall(where / "unpacked", filter="data")
    return where / "unpacked" / folder.name


def test_figures_of_timelines_are_drawn_from_packed_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = repacked(folder, tmp_path, monkeypatch)
    for name in ("toy", "ablation", "toy-timelines", "timeline"):
        made, expected = (draw_figure(FIGURES[name], read_runs(runs)) for runs in (packed, folder))
        assert made.caption == expected.caption
    run = Path("er/0")
    assert result(packed / run)["timeline"] == result(folder / run)["timeline"]
    assert entries(packed / run, "start") == entries(folder / run, "start")
    assert "label_set" in entries(packed / run, "start")[0]


def test_label_sets_and_timelines_of_a_published_protocol_are_omitted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "published"
    shutil.copytree(folder / "er/0", published / "run")
    settings = json.loads((published / "run/settings.json").read_text())
    (published / "run/settings.json").write_text(json.dumps(settings | {"protocol": "/somewhere/ps-tiny.json"}))
    packed = repacked(published, tmp_path, monkeypatch)
    assert json.loads((packed / "run/settings.json").read_text())["protocol"] == "ps-tiny.json"
    (start,) = entries(packed / "run", "start")
    assert start["tasks"] == ["task-0", "task-1"]
    for content in (start, result(packed / "run")):
        assert not {"label_set", "class_names", "timeline", "confusion"} & content.keys()
    assert read_runs(packed)[0].result is not None


def test_fewer_steps_are_kept_where_asked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, run = repacked(folder, tmp_path, monkeypatch, "10"), Path("er/0")
    steps = [entry["step"] for entry in entries(folder / run, "step")]
    assert [entry["step"] for entry in entries(packed / run, "step")] == [step for step in steps if step % 10 == 0]
    assert len(steps) > len(entries(packed / run, "step")) > 0
    assert len(entries(packed / run, "evaluation")) == len(entries(folder / run, "evaluation")) > 0
