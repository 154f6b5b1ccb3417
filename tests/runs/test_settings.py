"""Settings of a run: listed with a meaning, parsed, and refused where they are wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from _runs import spcl
from spcl.cli.app import app
from spcl.errors import SpclError
from spcl.memory import MEMORIES
from spcl.models import BACKBONES
from spcl.optimizers import OPTIMIZERS
from spcl.runs import RunSettings, load_settings_file, parse_assignments, resolve_settings
from spcl.runs.build import make_optimizer
from spcl.runs.settings import method_settings, run_settings

# -- every setting and its meaning


ROOT = Path(__file__).resolve().parents[2]


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["settings", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def test_every_setting_is_listed_once_with_a_meaning() -> None:
    listed = [setting for section in run_settings().values() for setting in section]
    assert sorted(setting.name for setting in listed) == sorted(RunSettings.model_fields)
    assert all(setting.meaning and setting.values and setting.default for setting in listed)
    output = shown()
    assert max(map(len, output.splitlines())) <= 80
    for name in (*RunSettings.model_fields, *BACKBONES, *OPTIMIZERS, *MEMORIES):
        assert name in output


def test_a_method_shows_its_own() -> None:
    assert {setting.name for setting in method_settings("soro")} >= {"method.sigma", "method.alpha"}
    assert "method.sigma" in shown("soro")
    assert "method.sigma" not in shown("er")
    wrong = CliRunner().invoke(app, ["settings", "sorro"])
    assert "did you mean 'soro'" in str(wrong.exception)


def test_the_page_in_the_docs_is_up_to_date(tmp_path: Path) -> None:
    page = spcl("settings", "--format", "markdown", folder=tmp_path).stdout  # without plug-ins of other tests
    assert page == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


# -- wrong settings, values and files


def _from_file(folder: Path, text: str) -> RunSettings:
    path = folder / "settings.yaml"
    path.write_bytes(text.encode())
    return resolve_settings(load_settings_file(path))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("on: 1\n", "True"),
        ("7: 1\n", "7"),
        ("plugins: 5\n", "plugins"),
        ("plugins: [5]\n", "5"),
        ("plugins: [{name: x}]\n", "sha256"),
        ("plugins: {name: x}\n", "plugins"),
        ("method:\n", "method"),
        ("data: {day: 2020-13-45}\n", "neither YAML nor JSON"),
        ("seed: [\n", "neither YAML nor JSON"),
        ("optimizer: {name: adam, betas: 3}\n", "betas"),
        ("optimizer: {name: adam, betas: [0.9]}\n", "betas"),
        ("optimizer: {name: sgd, momentum: much}\n", "momentum"),
        ("optimizer: {name: sgd, nesterov: 3}\n", "nesterov"),
        ("optimizer: {name: sgd, momentum: '0.9'}\n", "momentum"),
        ("optimizer: {name: adam, betas: ['0.9', 0.99]}\n", "betas"),
        ("schedule: {name: linear, final: '0.5'}\n", "final"),
        ("schedule: {name: steps, at: ['0.5']}\n", "at"),
        ("backbone: {name: mlp, hidden: [64, 32.5]}\n", "hidden"),
        ("backbone: {name: mlp, hidden: ['64']}\n", "hidden"),
        ("trackers: [wandb]\n", "tracker 'wandb' needs the option 'project'"),
        ("schedule: {name: cosine, warmup: 2}\n", "warmup"),
        ("schedule: {name: steps, at: [2]}\n", "at is"),
        ("augment: [{name: crop, padding: 0}]\n", "padding"),
        ("optimizer: {name: adam, betas: [2, 3]}\n", r"optimizer 'adam' cannot be made .*beta parameter.*: 2"),
        ("optimizer: {name: sgd, nesterov: true}\n", "optimizer 'sgd' cannot be made .*Nesterov"),
        ("device: gpu\n", r"there is no device 'gpu'; did you mean 'cuda'\?"),
        ("device: gpu:1\n", r"there is no device 'gpu:1'; did you mean 'cuda:1'\?"),
        ("device: cuda0\n", r"there is no device 'cuda0'; did you mean 'cuda:0'\?"),
        ("device: cuda:x\n", r"there is no device 'cuda:x'; did you mean 'cuda:0'\?"),
        ("device: ''\n", "there is no device ''; choose one of auto, cpu, cuda, cuda:0, mps"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SpclError, match=named):
        _from_file(tmp_path, text)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:7", "mps", "xpu"])
def test_a_device_of_another_machine_may_be_planned(device: str) -> None:
    assert resolve_settings({"device": device}).device == device


def test_lines_may_end_as_on_windows_and_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    settings = _from_file(tmp_path, "\ufeffseed: 3\r\nmethod: er\r\noptimizer:\r\n  name: adam\r\n  eps: 1e-7\r\n")
    assert (settings.seed, settings.method["name"]) == (3, "er")
    assert settings.optimizer == {"name": "adam", "eps": 1e-7}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        (".5e3", 500.0),
        ("2.e1", 20.0),
        ("[1e-3, 1]", [0.001, 1]),
        ("{a: 1e-3}", {"a": 0.001}),
        ("null", None),
        ("true", True),
        ("2020-13-45", "2020-13-45"),
        ("{name", "{name"),
        ("[5", "[5"),
        ("{a: 1, a: 2}", "{a: 1, a: 2}"),
        ("", None),
    ],
)
def test_values_are_yaml_and_numbers_may_have_exponents(text: str, value: Any) -> None:
    assert parse_assignments([f"x={text}"]) == {"x": value}


def test_options_of_optimisers_may_be_whole_numbers_and_lists() -> None:
    given = {"name": "adam", "betas": [0, 0.99], "weight_decay": 1, "amsgrad": True}
    settings = resolve_settings({"optimizer": given})
    assert settings.optimizer == given
    assert make_optimizer(settings, [nn.Parameter(torch.zeros(2))]).defaults["betas"] == (0.0, 0.99)


@pytest.mark.parametrize("seed", ["x", 1.5, -1, None, [1]])
def test_seeds_are_whole_numbers(seed: object) -> None:
    with pytest.raises(SpclError, match="settings: seed ="):
        resolve_settings({"seed": seed})
