"""What a plain install lacks is named by the commands that need it, and a release says one version."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
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
        assert re.findall(r"run: pip install .*\[(.*)\]", message) == ([extra] if extra else []), message


def test_the_command_for_an_extra_is_that_of_the_installation(tmp_path: Path) -> None:
    """A checkout is installed again with the extra, as no index knows it; a wheel finds itself installed."""
    library, module = ROOT / "src/spcl/errors.py", tmp_path / "lib" / "site-packages" / "spcl" / "errors.py"
    program, extra, path = shlex.split(runpy.run_path(str(library))["install_command"]("tune"))[1:]
    assert (program, extra) == ("install", "-e")
    project, brackets, rest = path.partition("[")
    known = tomllib.loads((Path(project) / "pyproject.toml").read_text())["project"]
    assert (known["name"], brackets, rest) == ("spcl", "[", "tune]")
    assert "tune" in known["optional-dependencies"]
    module.parent.mkdir(parents=True)
    module.write_bytes(library.read_bytes())
    assert runpy.run_path(str(module))["install_command"]("tune") == 'pip install "spcl[tune]"'


def test_the_citation_names_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [__version__]
