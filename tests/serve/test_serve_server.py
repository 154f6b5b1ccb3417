"""Services begin and end: by signals, beside others on the same port and state, as demo, command and unit."""

import configparser
import logging
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from redis_process import needs_redis
from serving import Answer, Client, X, http_settings, run_in_thread
from spcl.checkpoint import read_checkpoint
from spcl.cli.app import app
from spcl.errors import SpclError
from spcl.serve import ServeSettings, load_serve_settings
from spcl.serve.server import Server
from spcl.sources import FolderHub, Publisher

ROOT = Path(__file__).resolve().parents[2]


EXAMPLES = ROOT / "examples" / "serve"


NAMES = {"camera", "radar", "lidar", "thermometer"}


# -- beginning and end


def test_a_service_without_a_token_answers_this_machine_alone_and_ends_by_sigterm(tmp_path: Path) -> None:
    server = Server(http_settings(tmp_path))
    answers: list[Answer] = []

    def ask(address: str) -> None:
        client = Client(address)
        own = urlsplit(address).netloc
        client.wait(lambda: client.get("tasks").content["uptime"] > 0)
        answers.append(client.get("healthz"))
        answers.append(client.post("predict?task=camera", {"inputs": [[1, 2, 3, 4]]}))
        answers.append(client.post("tasks", {"name": "camera", "classes": 2}, {"Origin": f"http://{own}"}))
        answers.append(client.post("tasks", {"name": "radar", "classes": 2}, {"Origin": "http://example.org"}))
        answers.append(client.get("tasks", {"Host": "example.org"}))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    asking: list[threading.Thread] = []

    def ready(address: str) -> None:
        asking.append(threading.Thread(target=ask, args=(address,), daemon=True))
        asking[0].start()

    before = signal.getsignal(signal.SIGTERM)
    server.run(ready)
    asking[0].join()
    assert [answer.status for answer in answers] == [200, 404, 202, 403, 403]
    assert signal.getsignal(signal.SIGTERM) == before
    again = Server(http_settings(tmp_path))  # the task that was started by a request is still there
    thread, address = run_in_thread(again)
    client = Client(address)
    assert client.wait(lambda: client.task("camera"))
    again.stop()
    thread.join(60)


def test_a_port_that_is_taken_is_named(server: tuple[Server, str], tmp_path: Path) -> None:
    port = urlsplit(server[1]).port
    with pytest.raises(SpclError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use"):
        Server(http_settings(tmp_path, port=port)).run()


def test_a_standby_takes_over_port_and_state_and_can_be_stopped_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spcl")
    first = Server(http_settings(tmp_path))
    thread, address = run_in_thread(first)
    client = Client(address)
    client.wait(lambda: client.get("tasks").content["uptime"] > 0)
    assert client.post("tasks", {"name": "camera", "classes": 2}).status == 202
    same = http_settings(tmp_path, port=urlsplit(address).port)
    second, third = Server(same, standby=True), Server(same, standby=True)
    waiting = [threading.Thread(target=each.run, daemon=True) for each in (second, third)]
    for each in waiting:
        each.start()
    told = f"stands by, as port {urlsplit(address).port} of 127.0.0.1 is in use"
    assert client.wait(lambda: caplog.messages.count(told) == 2)
    third.stop()
    waiting[1].join(60)
    assert not waiting[1].is_alive()
    first.stop()
    thread.join(60)
    assert client.wait(lambda: second.service.status().tasks)
    assert client.task("camera")
    assert caplog.messages.count(told) == 2
    assert caplog.messages.count(f"takes over the state {tmp_path / 'state'}") == 1
    second.stop()
    waiting[0].join(60)
    assert not waiting[0].is_alive()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    given = http_settings(tmp_path).model_dump(mode="json", exclude_defaults=True)
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(given | {"http": {"port": 0}}))
    return path


@pytest.fixture
def primary(config: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A service in a process of its own, and its address."""
    command = [sys.executable, "-m", "spcl", "serve", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
        process.kill()


def test_a_standby_takes_over_when_the_service_is_killed(
    tmp_path: Path, config: Path, primary: tuple[subprocess.Popen[str], str]
) -> None:
    process, address = primary
    client = Client(address)
    publisher = Publisher(FolderHub(tmp_path / "hub"))
    publisher.start("camera", classes=2)

    def publish_until(batches: int) -> None:
        learned = (client.task("camera") or {"batches": 0})["batches"]
        for _ in range(learned, batches):
            publisher.publish("camera", X, torch.arange(6) % 2)
        client.wait(lambda: (client.task("camera") or {}).get("batches") == batches)

    publish_until(5)
    given = load_serve_settings(config)
    http = given.http.model_copy(update={"port": int(address.rstrip("/").rpartition(":")[2])})
    standby = Server(given.model_copy(update={"http": http}), standby=True)
    addresses: Queue[str] = Queue()
    thread = threading.Thread(target=standby.run, args=(addresses.put,), daemon=True)
    thread.start()
    publish_until(8)
    assert addresses.empty()
    os.kill(process.pid, signal.SIGKILL)
    assert addresses.get(timeout=60) == address
    client.wait(lambda: (client.task("camera") or {}).get("batches") == 8)
    publish_until(10)
    assert client.get("tasks").content["steps"] == 10
    standby.stop()
    thread.join(60)
    saved = read_checkpoint(tmp_path / "state" / "learner.safetensors")
    assert (saved["learner"]["steps"], saved["sources"]["stream"]["delivered"]) == (10, {"camera": 10})


# -- demo, command and examples


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
    assert (done.exit_code, done.stdout) == (0, f"the service is at http://127.0.0.1:{free_port}/\nsaved and stopped\n")
    assert list((tmp_path / "state").glob("*.safetensors"))


def test_the_log_of_the_command_tells_what_happened_with_time_and_level(tmp_path: Path, config: Path) -> None:
    publisher = Publisher(FolderHub(tmp_path / "hub"))
    publisher.start("camera", classes=2)
    publisher.publish("camera", X, torch.arange(6) % 2)
    publisher.publish("camera", X[:, :2], torch.arange(6) % 2)
    (tmp_path / "hub" / "tasks" / "no\x1b[2J\n2026-01-01 00:00:00,000 ERROR forged").mkdir()
    command = [sys.executable, "-m", "spcl", "serve", str(config), "--standby"]
    log = tmp_path / "log"

    def tells(process: subprocess.Popen[bytes], *texts: str) -> None:
        Client("").wait(lambda: process.poll() is not None or all(text in log.read_text() for text in texts))
        assert process.poll() is None, log.read_text()

    with log.open("a") as stderr, ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr))
            stack.callback(process.kill)
            return process

        first = start()
        tells(first, "begins with a new learner", "task camera started", "a message of task 'camera' was refused")
        standing_by = start()
        tells(standing_by, "stands by, as another service uses the state")
        first.kill()
        tells(standing_by, "takes over the state", "continues after step")
        (tmp_path / "hub" / "tasks").rename(tmp_path / "away")
        tells(standing_by, "the hub of the sources does not answer")
        (tmp_path / "away").rename(tmp_path / "hub" / "tasks")
        tells(standing_by, "the hub of the sources answers again")
        publisher.end("camera")
        tells(standing_by, "INFO task camera ended: after 1 batches")
        standing_by.terminate()
        assert standing_by.wait(60) == 0
    lines = log.read_text().splitlines()
    unlike = [line for line in lines if not re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) ", line)]
    assert unlike == []
    assert "saved after step 1" in lines[-1]
    assert "\x1b" not in log.read_text()


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
