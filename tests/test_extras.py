"""What a plain install lacks is named by the commands that need it, and a release says one version."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spcl import __version__
from spcl.cli.app import app
from spcl.errors import SpclError

ROOT = Path(__file__).resolve().parents[1]
DRAWING = ("matplotlib", "spcl.results.figures", "spcl.results.report", "spcl.results.compare")


@pytest.mark.parametrize("command", ["figure", "report", "compare"])
def test_commands_that_draw_name_the_extra(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith((*DRAWING, f"spcl.cli.{command}"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # cannot be imported
    result = CliRunner().invoke(app, [command, "runs"])
    assert isinstance(result.exception, SpclError)
    assert 'run: pip install "spcl[report]"' in str(result.exception)


def test_the_citation_names_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [__version__]
