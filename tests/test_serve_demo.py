"""The demo and the command start a service, and end by a signal with nothing left running."""

import os
import re
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from spcl.cli.app import app
from spcl.serve import load_serve_settings
from spcl.sources import FolderHub, Publisher
from test_serve_http import Client, X

ROOT = Path(__file__).resolve().parents[1]
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


def test_demo_learns_from_its_sensors_and_ends_by_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.setattr(sys, "argv", ["serve_demo.py", "--port", str(free_port)])
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
    folder = ROOT / "examples" / "serve"
    settings = load_serve_settings(folder / "serve.yaml")
    assert settings.state == folder / "state"
    assert settings.http.port == 8800
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert services["spcl"]["command"] == "spcl serve /config/serve.yaml"
    page = (ROOT / "docs" / "serve.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(state:.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert set(yaml.safe_load(shown)) <= set(yaml.safe_load((folder / "serve.yaml").read_text()))
