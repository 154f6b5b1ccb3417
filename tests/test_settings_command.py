"""``spcl settings`` and the page made from it."""

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from spcl.cli.app import app
from spcl.memory import MEMORIES
from spcl.models import BACKBONES
from spcl.optimizers import OPTIMIZERS
from spcl.runs import RunSettings
from spcl.runs.settings_page import method_settings, run_settings

ROOT = Path(__file__).parent.parent


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


def test_the_page_in_the_docs_is_up_to_date() -> None:
    command = [sys.executable, "-c", "from spcl.cli import main; main()", "settings", "--format", "markdown"]
    page = subprocess.run(command, capture_output=True, check=True).stdout.decode()  # without plug-ins of other tests
    assert page == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
