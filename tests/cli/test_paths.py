"""Paths: texts are as good as Path objects, ``~`` is the home folder, and hidden files are nobody's data."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from spcl.cli.app import app
from spcl.data import convert_protocol, draw_protocol, from_folder, load_protocol
from spcl.errors import DataError, SpclError
from spcl.grids import default_scenarios
from spcl.plugins import PluginError
from spcl.runs import RunFolder, execute, load_settings_file, resolve_settings, resume_settings
from spcl.runs.trained import find_files
from spcl.serve import load_serve_settings

TINY = {"benchmark": "ps-glyphs", "tasks": 2, "batch_size": 2048, "method": "er", "threads": 1}


def test_a_run_takes_its_folder_as_text(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    execute(resolve_settings(TINY), out)
    assert RunFolder(out).read_result() is not None
    assert resume_settings(out).tasks == 2
    assert load_settings_file(f"{out}/settings.json")["tasks"] == 2


def test_protocols_take_their_files_as_text(tmp_path: Path) -> None:
    protocol = draw_protocol(4, 2, torch.arange(4).repeat(10), batch_size=5, seed=0)
    protocol.save(str(tmp_path / "new" / "protocol.json"))
    assert load_protocol(str(tmp_path / "new" / "protocol.json")) == protocol
    with pytest.raises(DataError, match=r"cannot read the protocol absent\.yml"):
        convert_protocol("absent.yml", "ps-emnist", 128)


def _serve_file(folder: Path, **more: object) -> Path:
    path = folder / "serve.yaml"
    content = {"state": "~/state", "source": {"name": "folder", "path": "hub"}, "inputs": {"shape": [4]}, **more}
    path.write_text(json.dumps(content))
    return path


def test_paths_of_a_service_start_from_its_file_or_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = load_serve_settings(str(_serve_file(tmp_path, http={"token_file": "~/token"})))
    assert settings.state == tmp_path / "home" / "state"
    assert settings.source == {"name": "folder", "path": str(tmp_path / "hub")}
    assert settings.http.token_file == tmp_path / "home" / "token"
    with pytest.raises(PluginError, match=f"the plug-in {tmp_path}/own.py does not exist"):
        load_serve_settings(_serve_file(tmp_path, learner={"plugins": ["own.py"]}))


def test_a_service_whose_samples_have_no_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpclError, match="parts"):
        load_serve_settings(_serve_file(tmp_path, inputs={"parts": {}}))


def test_hidden_files_are_no_pictures(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for number in range(2):
            Image.new("L", (4, 4), 40 * number).save(tmp_path / kind / f"{number}.png")
        (tmp_path / kind / "._0.png").write_bytes(b"what macOS stores beside a copied file")
    assert from_folder(tmp_path, size=8).train_samples == 2
    assert [path.name for path in find_files([tmp_path])] == ["0.png", "1.png"] * 2


@pytest.mark.parametrize(("text", "named"), [("method:\n", "method is None"), ("method: [er]\n", "method is")])
def test_a_grid_refuses_a_file_without_a_name_of_a_method(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    outcome = CliRunner().invoke(app, ["grid", "--out", str(tmp_path), "--settings", str(tmp_path / "settings.yaml")])
    assert isinstance(outcome.exception, SpclError)
    assert named in str(outcome.exception)


def test_scenarios_of_data_with_wrong_options_are_an_error() -> None:
    with pytest.raises(SpclError, match="data is 5"):
        default_scenarios({"benchmark": "ps-glyphs", "data": 5})
