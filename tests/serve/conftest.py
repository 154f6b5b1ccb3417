"""A service over HTTP that tests of several files share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serving import TOKEN, Client, X, http_settings, run_in_thread
from spcl.serve.server import Server
from spcl.sources import FolderHub, Publisher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[Server, str]]:
    """A service with a token that has learned two tasks."""
    (folder / "token").write_text(f"{TOKEN}\n")
    server = Server(http_settings(folder, token_file=folder / "token"))
    thread, address = run_in_thread(server)
    publish(folder)
    client = Client(address, TOKEN)
    client.wait(
        lambda: (client.task("camera") or {}).get("batches") == 5 == (client.task("speed") or {}).get("batches")
    )
    client.wait(lambda: server.service.snapshot.step == client.get("tasks").content["steps"])
    yield server, address
    server.stop()
    thread.join(60)
    assert not thread.is_alive()


def publish(folder: Path) -> None:
    publisher = Publisher(FolderHub(folder / "hub"))
    publisher.start("camera", classes=["cat", "dog", "bird"])
    publisher.start("speed", kind="regression")
    for _ in range(5):
        publisher.publish("camera", X, torch.arange(6) % 3)
        publisher.publish("speed", X, X[:, :1])
    publisher.publish("camera", X, torch.arange(6))  # labels that it does not have


@pytest.fixture(scope="module")
def client(server: tuple[Server, str]) -> Client:
    return Client(server[1], TOKEN)
