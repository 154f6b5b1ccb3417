"""A run is sent to a colleague: as an archive, or as a folder whose data and plug-ins are given again."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import _runs
from small_benchmark import StopAtStep, small_settings, write_benchmark
from spcl.errors import DataError
from spcl.runs import (
    FolderError,
    InterruptedRunError,
    RunFolder,
    UnfinishedRunError,
    bundle_run,
    evaluate_run,
    execute,
    read_run,
    resume_settings,
    unpack_bundle,
)
from spcl.runs.bundle import BundleError
from spcl.runs.settings import portable_settings

PLUGIN = """
from pathlib import Path
from torch import nn
from spcl.plugins import backbone

Path(__file__).with_suffix(".imported").touch()

@backbone("of-mine")
def of_mine(inputs, width=16):
    return nn.Sequential(nn.Linear(inputs.shape[0], width), nn.Tanh())
"""
GIVEN = ("--benchmark", "data.npz", "--plugin", "net.py", "--protocol", "plan.json")
SMALL = ("--set", "tasks=3", "--set", "batch_size=8", "--set", "memory_budget=24", "--device", "cpu")


def spcl(folder: Path, *arguments: object) -> str:
    done = _runs.spcl(*arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def error_of(folder: Path, *arguments: object) -> str:
    done = _runs.spcl(*arguments, folder=folder)
    assert done.returncode == 1
    return done.stderr


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a plug-in, data and protocol of its own, and its archive."""
    folder = tmp_path_factory.mktemp("sender")
    write_benchmark(folder / "data.npz")
    (folder / "net.py").write_text(PLUGIN)
    spcl(folder, "protocol", "--benchmark", "data.npz", *SMALL[:4], "--out", "plan.json")
    spcl(folder, "run", *GIVEN, *SMALL, "--set", "backbone=of-mine", "--out", "run")
    spcl(folder, "bundle", "run", "--out", "run.zip")
    return folder


@pytest.fixture
def colleague(sender: Path, tmp_path: Path) -> Path:
    """Another machine: it has the archive, the folder of the run, data and plug-in, and nothing where it was."""
    there = tmp_path / "there"
    there.mkdir()
    shutil.copy(sender / "run.zip", there)
    shutil.copytree(sender / "run", there / "run")
    shutil.copy(sender / "data.npz", there / "moved.npz")
    (there / "copied").mkdir()
    shutil.copy(sender / "net.py", there / "copied")
    shutil.copy(sender / "plan.json", there / "copied")
    return there


def test_an_unpacked_run_is_evaluated_with_its_plugin_and_data(colleague: Path) -> None:
    assert "read its plug-ins before you name them: got/plugins/net.py" in spcl(
        colleague, "unbundle", "run.zip", "--out", "got"
    )
    shown = spcl(colleague, "evaluate", "got", "--plugin", "got/plugins/net.py", "--benchmark", "moved.npz")
    rows = [line.split() for line in shown.splitlines()[1:]]
    assert all(recorded == now for *_, recorded, now in rows)
    assert len(rows) == 4


def test_nothing_of_an_archive_runs_unless_it_is_named(colleague: Path) -> None:
    spcl(colleague, "unbundle", "run.zip", "--out", "got")
    for command in (
        ("evaluate", "got", "--benchmark", "moved.npz"),
        ("predict", "got", "moved.npz", "--task", "task-0"),
        ("run", "--settings", "settings.json", "--out", "again"),
    ):
        folder = colleague / "got" if command[0] == "run" else colleague
        assert "--plugin" in error_of(folder, *command)
    assert not list(colleague.rglob("*.imported"))


def test_paths_of_an_archive_are_relative(colleague: Path, sender: Path) -> None:
    folder = unpack_bundle(colleague / "run.zip", colleague / "got")
    settings = json.loads(folder.settings.read_text())
    assert [plugin["name"] for plugin in settings["plugins"]] == ["plugins/net.py"]
    assert (settings["benchmark"], settings["protocol"]) == ("./data.npz", "./protocols/plan.json")
    assert str(sender) not in folder.settings.read_text()
    assert (folder.path / "plugins" / "net.py").read_text() == PLUGIN
    assert folder.read_result() == RunFolder(sender / "run").read_result()


def test_plugins_and_data_given_again_replace_the_recorded_paths(colleague: Path) -> None:
    given = ("--plugin", "copied/net.py", "--benchmark", "moved.npz", "--protocol", "copied/plan.json")
    spcl(colleague, "run", "--settings", "run/settings.json", *given, "--out", "again")
    assert _runs.results_in(colleague / "again")["."]["tasks"] == _runs.results_in(colleague / "run")["."]["tasks"]
    (colleague / "copied" / "net.py").write_text(PLUGIN + "# changed")
    changed = error_of(colleague, "run", "--settings", "run/settings.json", *given, "--out", "other")
    assert "has changed since it was recorded" in changed


def test_evaluate_takes_data_that_was_moved_or_came_from_python(tmp_path: Path) -> None:
    benchmark = write_benchmark(tmp_path / "data.npz")
    execute(small_settings(benchmark), tmp_path / "run")
    shutil.move(benchmark, tmp_path / "moved.npz")
    assert evaluate_run(read_run(tmp_path / "run"), "cpu", benchmark=str(tmp_path / "moved.npz")).difference == 0.0
    shutil.copy(write_benchmark(tmp_path / "other.npz", per_class=30), tmp_path / "moved.npz")
    with pytest.warns(UserWarning, match="has changed since the run was made"):
        evaluate_run(read_run(tmp_path / "run"), "cpu", benchmark=str(tmp_path / "moved.npz"))


@pytest.fixture(scope="module")
def archive(sender: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(sender / "run.zip") as file:
        return {name: file.read(name) for name in file.namelist()}


def repacked(files: dict[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return path


HARMS: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "another checksum": lambda files: files | {"plugins/net.py": b"import os"},
    "a file more": lambda files: files | {"plugins/more.py": b"import os"},
    "a parent": lambda files: files | {"../evil.py": b""},
    "a hidden parent": lambda files: files | {"plugins/../../evil.py": b""},
    "dots": lambda files: files | {"plugins/..": b""},
    "an absolute path": lambda files: files | {"/tmp/evil.py": b""},
    "a drive": lambda files: files | {"plugins/C:evil.py": b""},
    "a backslash": lambda files: files | {"plugins\\..\\evil.py": b""},
    "a folder": lambda files: files | {"plugins/": b""},
    "another kind": lambda files: files | {"evil.sh": b""},
    "a bomb": lambda files: files | {"metrics.jsonl": bytes(10_000_000)},
    "no settings": lambda files: {name: files[name] for name in files if name != "settings.json"},
    "no checksums": lambda files: {name: files[name] for name in files if name != "bundle.json"},
    "other checksums": lambda files: files | {"bundle.json": b"[]"},
}


@pytest.mark.parametrize("harm", HARMS)
def test_harmful_and_damaged_archives_are_refused_and_leave_nothing(
    archive: dict[str, bytes], tmp_path: Path, harm: str
) -> None:
    unpack_bundle(repacked(archive, tmp_path / "fine.zip"), tmp_path / "fine")
    with pytest.raises(BundleError, match=r"harmful\.zip .*; ask for"):
        unpack_bundle(repacked(HARMS[harm](archive), tmp_path / "harmful.zip"), tmp_path / "got")
    assert not (tmp_path / "got").exists()
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_what_is_no_archive_is_refused(sender: Path, tmp_path: Path, content: bytes | None) -> None:
    whole = (sender / "run.zip").read_bytes()
    (tmp_path / "bad.zip").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(BundleError, match=r"bad\.zip is no archive of a run"):
        unpack_bundle(tmp_path / "bad.zip", tmp_path / "got")
    with pytest.raises(BundleError, match=r"cannot read .*missing\.zip"):
        unpack_bundle(tmp_path / "missing.zip", tmp_path / "got")


def test_folders_and_archives_are_not_overwritten(sender: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FolderError, match="choose another folder"):
        unpack_bundle(sender / "run.zip", tmp_path / "full")
    with pytest.raises(FolderError, match="exists; remove it"):
        bundle_run(sender / "run", sender / "run.zip")


@pytest.mark.parametrize("change", ["changed", "gone"])
def test_only_complete_runs_with_their_plugins_are_bundled(sender: Path, tmp_path: Path, change: str) -> None:
    with pytest.raises(FolderError, match="there is no run"):
        bundle_run(tmp_path, tmp_path / "run.zip")
    plugin = tmp_path / "net.py"
    shutil.copytree(sender / "run", run := tmp_path / "run")
    settings: dict[str, Any] = json.loads((run / "settings.json").read_text())
    settings["plugins"][0]["name"] = str(plugin)
    (run / "settings.json").write_text(json.dumps(settings))
    if change == "changed":
        plugin.write_text(PLUGIN + "# changed")
    with pytest.raises(FolderError, match=r"net\.py has changed|cannot read .*net\.py"):
        bundle_run(run, tmp_path / "run.zip")
    (run / "result.json").unlink()
    with pytest.raises(UnfinishedRunError):
        bundle_run(run, tmp_path / "run.zip")
    assert not (tmp_path / "run.zip").exists()


@pytest.fixture
def moved(sender: Path, tmp_path: Path) -> Path:
    """A study that was moved: its data, plug-in and protocol, a complete run, and an interrupted one."""
    study = tmp_path / "study"
    study.mkdir()
    for name in ("data.npz", "net.py", "plan.json"):
        shutil.copy(sender / name, study)
    spcl(study, "run", *GIVEN, *SMALL, "--set", "backbone=of-mine", "--out", "runs/whole")
    settings = resume_settings(study / "runs" / "whole")
    with pytest.raises(InterruptedRunError):
        execute(settings, study / "runs" / "stopped", view=StopAtStep(4))
    return study.rename(tmp_path / "moved")


def test_a_study_that_was_moved_is_resumed_predicted_and_evaluated(moved: Path) -> None:
    """Only the plug-in is named again: what a stranger's folder brings along is not run unasked."""
    recorded = json.loads((moved / "runs/whole/settings.json").read_text())
    assert (recorded["benchmark"], recorded["protocol"]) == ("../../data.npz", "../../plan.json")
    assert [plugin["name"] for plugin in recorded["plugins"]] == ["../../net.py"]
    assert recorded["recorded_in"] == str(moved.with_name("study") / "runs/whole")
    uses = {
        "resume": ("run", "--resume", "--out", "runs/stopped"),
        "evaluate": ("evaluate", "runs/whole"),
        "predict": ("predict", "runs/whole", "data.npz", "--task", "task-0"),
        "export": ("export", "runs/whole", "--task", "task-0", "--out", "model.pt2"),
        "again": ("run", "--settings", "runs/whole/settings.json", "--out", "runs/again"),
    }
    for words in uses.values():
        (moved / "net.imported").unlink(missing_ok=True)
        assert "the plug-in net.py came with a record; if you trust that file, name it" in error_of(moved, *words)
        assert not (moved / "net.imported").exists()
        spcl(moved, *words, "--plugin", "net.py")
    results = [RunFolder(moved / "runs" / name).read_result() for name in ("whole", "stopped", "again")]
    assert all(result is not None and result.tasks == results[0].tasks for result in results)  # type: ignore[union-attr]
    assert spcl(moved, "compare", "runs/whole", "runs/again")
    spcl(moved, "bundle", "runs/whole", "--out", "whole.zip")
    assert unpack_bundle(moved / "whole.zip", moved / "got").read_result() == results[0]


def test_a_run_and_its_copy_use_data_and_plugins_where_they_were(sender: Path, tmp_path: Path) -> None:
    shutil.copytree(sender / "run", tmp_path / "copied")
    for run in (sender / "run", tmp_path / "copied"):
        rows = [line.split() for line in spcl(tmp_path, "evaluate", run).splitlines()[1:]]
        assert all(recorded == now for *_, recorded, now in rows)


@pytest.mark.parametrize("where", [".", "", "/proc/self/cwd", None, 5, "\0"])
def test_a_record_cannot_name_the_plugins_beside_it(sender: Path, tmp_path: Path, where: object) -> None:
    """A stranger does not know where the folder will be, but can write a record by hand."""
    shutil.copytree(sender / "run", tmp_path / "run")
    shutil.copy(sender / "net.py", tmp_path)
    file = tmp_path / "run" / "settings.json"
    settings: dict[str, Any] = json.loads(file.read_text())
    names = ["net.py", "../net.py", *[f"{where}/net.py"] * (where == "/proc/self/cwd")]
    for name in names:
        plugins = [settings["plugins"][0] | {"name": name}]
        file.write_text(json.dumps(settings | {"plugins": plugins, "recorded_in": where}))
        for words in (("evaluate", "run"), ("run", "--resume", "--out", "run"), ("run", "--settings", file)):
            assert "came with a record" in error_of(tmp_path, *words, *["--out=new"] * ("--settings" in words))
    assert not list(tmp_path.rglob("*.imported"))


def test_records_with_absolute_paths_and_files_of_other_trees_are_read(sender: Path, tmp_path: Path) -> None:
    """Earlier versions recorded absolute paths."""
    shutil.copytree(sender / "run", run := tmp_path / "run")
    settings: dict[str, Any] = json.loads((run / "settings.json").read_text())
    (plugin,) = settings["plugins"]
    paths = {"benchmark": str(sender / "data.npz"), "protocol": str(sender / "plan.json"), "data_dir": "/data"}
    plugins = [{"name": str(sender / "net.py"), "sha256": plugin["sha256"]}]
    (run / "settings.json").write_text(json.dumps(settings | paths | {"plugins": plugins}))
    again = resume_settings(run)
    assert again == resume_settings(sender / "run").model_copy(update={"data_dir": "/data"})
    assert portable_settings(again, run)["data_dir"] == "/data"
    assert portable_settings(again, Path("/elsewhere/run")) == again.model_dump(mode="json")
    assert RunFolder(run).read_settings() == again.model_dump(mode="json")
    assert evaluate_run(read_run(run), "cpu").difference == 0.0


def test_an_interrupted_run_is_resumed_elsewhere(tmp_path: Path) -> None:
    benchmark = write_benchmark(tmp_path / "data.npz")
    whole = execute(small_settings(benchmark), tmp_path / "whole")
    with pytest.raises(InterruptedRunError):
        execute(small_settings(benchmark), tmp_path / "run", view=StopAtStep(12))
    (tmp_path / "there").mkdir()
    shutil.move(benchmark, tmp_path / "there" / "data.npz")
    with pytest.raises(DataError, match="does not exist"):
        resume_settings(tmp_path / "run")
    spcl(tmp_path, "run", "--resume", "--out", "run", "--benchmark", "there/data.npz")
    assert RunFolder(tmp_path / "run").read_result().tasks == whole.tasks  # type: ignore[union-attr]
    assert "give no others (found seed)" in error_of(tmp_path, "run", "--resume", "--out", "run", "--seed", "3")
