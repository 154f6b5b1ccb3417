"""What a plain install lacks is named by the commands that need it, and a release says one version."""

import re
import subprocess
import sys
from pathlib import Path

from spcl import __version__

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(("matplotlib", "jinja2", "fastapi")))  # cannot be imported
from typer.testing import CliRunner
from spcl.cli.app import app
for command in sys.argv[1:]:
    error = CliRunner().invoke(app, command.split()).exception
    print(type(error).__name__)
    print(error)
"""


def test_only_commands_that_draw_or_serve_need_an_extra_and_name_it() -> None:
    extras = {"figure toy": "report", "report runs": "report", "serve runs": "serve"}
    extras |= dict.fromkeys(("table runs", "compare runs"), "")
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *extras], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for extra, kind, message in zip(extras.values(), lines[::2], lines[1::2], strict=True):
        assert kind == "SpclError", message
        assert re.findall(r'run: pip install "spcl\[(.*)\]"', message) == ([extra] if extra else []), message


def test_the_citation_names_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [__version__]
