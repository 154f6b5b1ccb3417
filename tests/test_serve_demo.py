"""The demo and the command start a service, and end by a signal with nothing left running."""

import configparser
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from redis_process import needs_redis
from spcl.cli.app import app
from spcl.serve import ServeSettings, load_serve_settings
from spcl.serve.settings import HttpSettings, InputSettings, TaskSettings
from spcl.sources import FolderHub, Publisher
from test_serve_http import Client, X

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "serve"
NAMES = {"camera", "radar", "lidar", "thermometer"}


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def signalled(number: int, learned: set[str], port: int) -> Iterator[None]:
    """Send a signal to this process once a service in it has learned batches of these tasks."""
    client = Client(f"http://127.0.0.1:{port}/")

    def names() -> set[str]:
        try:
            return {task["name"] for task in client.get("tasks").content["tasks"] if task["batches"]}
        except OSError:
            return set()

    def wait() -> None:
        try:
            client.wait(lambda: names() >= learned)
        finally:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield
    thread.join()
    with pytest.raises(OSError, match="refused"):
        client.get("healthz")


@pytest.mark.parametrize("options", [[], pytest.param(["--redis"], marks=needs_redis)], ids=["folder", "redis"])
def test_demo_learns_from_its_sensors_and_ends_by_ctrl_c(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free_port: int,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.setattr(sys, "argv", ["serve_demo.py", "--port", str(free_port), *options])
    with signalled(signal.SIGINT, NAMES, free_port):
        runpy.run_path(str(ROOT / "examples" / "serve_demo.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"http://127.0.0.1:{free_port}/" in printed
    assert printed.endswith("saved and stopped\n")
    assert list(tmp_path.glob("spcl-demo-*")) == []


def test_command_saves_and_ends_with_status_0_by_sigterm(tmp_path: Path, free_port: int) -> None:
    publisher = Publisher(FolderHub(tmp_path / "hub"))
    publisher.start("camera", classes=2)
    publisher.publish("camera", X, (X[:, 0] > 0).long())
    config = tmp_path / "serve.yaml"
    source = {"name": "folder", "path": "hub"}
    given = {"state": "state", "source": source, "inputs": {"shape": [4]}, "http": {"port": free_port}}
    config.write_text(yaml.safe_dump(given))
    with signalled(signal.SIGTERM, {"camera"}, free_port):
        done = CliRunner().invoke(app, ["serve", str(config)])
    assert (done.exit_code, done.output) == (0, f"the service is at http://127.0.0.1:{free_port}/\nsaved and stopped\n")
    assert list((tmp_path / "state").glob("*.safetensors"))


def test_settings_in_the_examples_are_valid() -> None:
    settings = load_serve_settings(EXAMPLES / "serve.yaml")
    assert settings.state == EXAMPLES / "state"
    assert settings.http.port == 8800
    page = (ROOT / "docs" / "serve.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(state:.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert set(yaml.safe_load(shown)) <= set(yaml.safe_load((EXAMPLES / "serve.yaml").read_text()))


def test_the_example_shows_every_setting() -> None:
    text = (EXAMPLES / "serve.yaml").read_text()
    for section in (ServeSettings, InputSettings, TaskSettings, HttpSettings):
        assert [name for name in section.model_fields if not re.search(rf"\b{name}:", text)] == []


def changed_settings(comment: str) -> ServeSettings:
    """Return the settings of the example with the changes that a comment in a file beside it asks for."""
    (changes,) = re.findall(r"^# In \S*serve.yaml: (.*?)\.?$", re.sub(r"\n#   ", " ", comment), re.MULTILINE)
    return ServeSettings.of(yaml.safe_load((EXAMPLES / "serve.yaml").read_text()) | yaml.safe_load(f"{{{changes}}}"))


def test_compose_file_runs_a_command_that_exists_on_paths_that_it_has() -> None:
    text = (EXAMPLES / "compose.yaml").read_text()
    content = yaml.safe_load(text)
    service, redis = content["services"]["spcl"], content["services"]["redis"]
    assert set(service["depends_on"]) < content["services"].keys()
    volumes = dict(each.split(":")[:2] for each in service["volumes"] + redis["volumes"])
    assert {name for name in volumes if not name.startswith(".")} == content["volumes"].keys()
    name, *arguments = service["command"].split()
    assert (name, parsed(arguments)["config"]) == ("spcl", Path(volumes["./serve.yaml"]))
    settings = changed_settings(text)
    assert settings.state == Path(volumes["state"])
    assert settings.source == {"name": "redis", "url": "redis://redis:6379/0"}
    assert f"127.0.0.1:{settings.http.port}:{settings.http.port}" in service["ports"]
    assert str(settings.http.token_file) == f"/run/secrets/{service['secrets'][0]}"
    assert f"http://127.0.0.1:{settings.http.port}/healthz" in service["healthcheck"]["test"][-1]


def test_systemd_unit_runs_a_command_that_exists_in_folders_that_it_may_write() -> None:
    text = (EXAMPLES / "spcl.service").read_text()
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    program, *arguments = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "spcl"
    assert parsed(arguments)["config"] == Path("/etc/spcl/serve.yaml")
    settings = changed_settings(text)
    assert settings.state == Path("/var/lib") / unit["Service"]["StateDirectory"]
    assert settings.source["name"] == "redis"
    assert settings.http.token_variable == "SPCL_TOKEN"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "spcl.service"
    unit.write_text((EXAMPLES / "spcl.service").read_text().replace("/opt/spcl/bin/spcl", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters that the command gives to ``spcl serve``."""
    commands: Any = typer.main.get_command(app)
    with commands.make_context("spcl", arguments[:]) as outer:
        name, command, rest = commands.resolve_command(outer, arguments)
        return dict(command.make_context(name, rest).params)
