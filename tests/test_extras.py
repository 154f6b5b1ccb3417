"""What a plain install lacks is named by the commands that need it, and a release says one version."""

import re
import subprocess
import sys
from pathlib import Path

from spcl import __version__

ROOT = Path(__file__).resolve().parents[1]

WITHOUT_EXTRAS = """
import sys
sys.modules["matplotlib"] = sys.modules["fastapi"] = None  # cannot be imported
from typer.testing import CliRunner
from spcl.cli.app import app
for command in sys.argv[1:]:
    print(type(CliRunner().invoke(app, [command, "runs"]).exception).__name__)
    print(CliRunner().invoke(app, [command, "runs"]).exception)
"""


def test_only_commands_that_draw_or_serve_need_an_extra_and_name_it() -> None:
    extras = {"figure": "report", "report": "report", "compare": "report", "serve": "serve", "table": None}
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *extras], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for extra, kind, message in zip(extras.values(), lines[::2], lines[1::2], strict=True):
        assert kind == "SpclError", message
        assert re.findall(r'run: pip install "spcl\[(.*)\]"', message) == ([extra] if extra else []), message


def test_the_citation_names_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [__version__]
