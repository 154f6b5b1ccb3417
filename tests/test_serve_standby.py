"""A standby takes over address and state of a service that was killed, with every batch learned once."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
import torch
import yaml

from spcl.checkpoint import read_checkpoint
from spcl.serve import load_serve_settings
from spcl.serve.server import Server
from spcl.sources import FolderHub, Publisher
from test_serve_http import Client, X, settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    given = settings(tmp_path).model_dump(mode="json", exclude_defaults=True)
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
