"""What new users ran into: errors in one sentence, settings files shared by commands, models of moved plug-ins."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from _runs import spcl
from small_benchmark import small_settings
from spcl._util.registry import Registry
from spcl.cli.app import app
from spcl.errors import SpclError
from spcl.plugins import PluginError, load_plugins
from spcl.runs import execute, load_run, resolve_settings

PLUGIN = """
import sys
import torch
from torch import nn
from spcl.plugins import backbone, data_set, loss, tracker, transform

@backbone("raises")
def raises(inputs): raise RuntimeError("no such layer")

@backbone("plain")
def plain(inputs, width: int = 8): return nn.Linear(inputs.shape[0], width)

@data_set("lost")
def lost(): return {}["nothing"]

@transform("bad-transform")
def bad_transform(): return lambda x: x.no_such_method()

@loss("focal")
def focal(task, gamma: float = 2.0): return nn.functional.cross_entropy

@tracker("silent")
class Silent:
    def __init__(self, folder, settings): ...
    def step(self, step, values): raise KeyError("losses")
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "things.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["run", "--out", "", "--benchmark", "ps-glyphs"], "--out"),
        (["grid", "--out", "", "--dry-run"], "--out"),
        (["run", "--out", "x", "--set", "tasks=2", "--set", ""], "--set"),
        (["run", "--out", "x", "--method="], "--method"),
        (["table", ""], "an argument"),
        (["data", "get", "ps-emnist", "--data-dir", ""], "--data-dir"),
    ],
)
def test_empty_arguments_are_refused(
    words: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell makes them of variables that are not set; an empty path would be the current folder."""
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, words)
    assert str(outcome.exception) == f"{name} is empty; give it a value, or leave it out"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "raises"}, "backbone 'raises' cannot be made: RuntimeError: no such layer"),
        ({"augment": "bad-transform"}, r"augment raised AttributeError on \d+ samples of float32\[8\]: "),
        ({"trackers": ["silent"]}, "the tracker Silent raised KeyError: 'losses'; leave it out or mend it"),
        ({"loss": {"name": "focal", "gamma": "abc"}}, "loss 'focal': option 'gamma' = 'abc': Input should be"),
        ({"backbone": {"name": "plain", "width": "x"}}, "backbone 'plain': option 'width' = 'x': Input should"),
        ({"backbone": {"name": "transformers:bert", "hidden_sise": 8}}, "'hidden_sise'; did you mean 'hidden_size'"),
        ({"backbone": "transformers:bertt"}, "transformers has no model type 'bertt'; did you mean 'bert'"),
    ],
)  # fmt: skip
def test_errors_of_plugins_and_options_are_one_sentence(
    changes: dict[str, object], message: str, benchmark: Path, plugin: Path, tmp_path: Path
) -> None:
    if "transformers" in str(changes):
        pytest.importorskip("transformers")
    with pytest.raises(SpclError, match=message) as error:
        execute(small_settings(benchmark, plugins=[str(plugin)], **changes), tmp_path / "run")
    assert "\n" not in str(error.value)


def test_a_data_set_that_raises_and_a_plugin_that_exits_are_named(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(SpclError, match="data set 'lost' cannot be made: KeyError: 'nothing'"):
        resolve_settings({"plugins": [str(plugin)], "benchmark": "lost"})
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(PluginError, match=r"exits\.py cannot be used in line 2: SystemExit: 3"):
        load_plugins([str(tmp_path / "exits.py")])


def test_lists_may_be_one_name_or_names_with_commas(benchmark: Path) -> None:
    assert resolve_settings({"augment": "crop, flip"}).augment == ("crop", "flip")
    assert small_settings(benchmark, frozen="layers.1.*").frozen == ("layers.1.*",)


def test_a_tracker_that_is_not_installed_is_found_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SpclError, match=r"wandb is not installed; run: pip install .*\[wandb\]"):
        resolve_settings({"trackers": [{"name": "wandb", "project": "x"}]})


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_grid_and_tune_take_the_settings_file_of_a_run(benchmark: Path, tmp_path: Path) -> None:
    settings = small_settings(benchmark, method={"name": "er"}, seed=3, evaluate="ended")
    execute(settings, tmp_path / "run")
    file = tmp_path / "run" / "settings.json"
    grid = invoke("grid", "--settings", file, "--dry-run", "--out", tmp_path / "grid")
    assert grid.exit_code == 0, grid.output
    assert re.findall(r"grid/(\S+)", grid.output) == ["task/er/config-0/seed-3"]
    several = invoke("grid", "--settings", file, "--seeds", "0-1", "--dry-run", "--out", tmp_path / "grid")
    assert len(re.findall(r"grid/(\S+)", several.output)) == 2
    flags = ["--search", "learning_rate=log:0.001:0.01", "--trials", 1, "--out", tmp_path / "tuning"]
    tuned = invoke("tune", "--settings", file, *flags)
    assert tuned.exit_code == 0, tuned.output
    assert "--method er" in tuned.output
    recorded = json.loads((tmp_path / "tuning" / "tuning.json").read_text())
    assert (recorded["method"], recorded["seeds"]) == ("er", [3])


def test_every_method_shows_its_settings() -> None:
    for method in ("torchjd:UPGrad", "torchjd:CAGrad", "torchjd:Krum"):
        shown = invoke("settings", method)
        assert shown.exit_code == 0, shown.output
        assert "method.alpha" in shown.output
    assert "method.c " in invoke("settings", "torchjd:CAGrad").output


def test_a_model_is_loaded_with_a_plugin_that_was_moved_or_changed(
    benchmark: Path, plugin: Path, tmp_path: Path
) -> None:
    execute(small_settings(benchmark, plugins=[str(plugin)], backbone="plain"), tmp_path / "run")
    moved = plugin.rename(tmp_path / "moved.py")
    with pytest.raises(PluginError, match=r"things\.py does not exist"):
        load_run(tmp_path / "run")
    evaluate = ("evaluate", "run", "--plugin", moved)
    loaded = spcl(*evaluate, folder=tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    moved.write_text(PLUGIN + "# a comment\n")
    changed = spcl(*evaluate, folder=tmp_path)
    assert "moved.py is not what the run was trained with (its checksum differs)" in changed.stderr
    evaluated = spcl(*evaluate, folder=tmp_path, strict=False)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "recorded" in evaluated.stdout


def test_options_without_types_are_taken_as_they_are() -> None:
    registry: Registry[type] = Registry("thing")
    registry.register("any")(lambda value=1: value)
    assert registry.make({"name": "any", "value": "text"}) == "text"
