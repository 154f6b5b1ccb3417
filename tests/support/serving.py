"""A service in a thread, with a hub of one's own, and what tests ask of it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from click.testing import Result
from typer.testing import CliRunner

from list_hub import ListHub, batch
from spcl.checkpoint import read_checkpoint
from spcl.cli.app import app
from spcl.serve import Event, ServeSettings, Service, TaskStatus
from spcl.serve.server import Server
from spcl.sources import HUBS, Hub, Publisher

LONG = 60.0
HUB: dict[str, Any] = {}


@HUBS.register("list-of-tests")
def list_of_tests(key: str) -> Any:
    return HUB.setdefault(key, ListHub())


def settings_of(folder: Path, **changes: Any) -> ServeSettings:
    """Settings of a small service whose hub is the list of that folder."""
    learner = {"backbone": {"name": "mlp", "hidden": [8]}, "memory_budget": 20} | changes.pop("learner", {})
    values = {"state": str(folder / "state"), "source": {"name": "list-of-tests", "key": str(folder)}}
    defaults = {"inputs": {"shape": [3]}, "learner": learner, "checkpoint_seconds": 0.05}
    return ServeSettings.of(values | defaults | changes)


@contextmanager
def running(settings: ServeSettings, **options: Any) -> Iterator[tuple[Service, list[Event]]]:
    events: list[Event] = []
    service = Service(settings, on_event=events.append, **options)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            service.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield service, events
    finally:
        service.stop()
        thread.join(LONG)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; it may ask for tasks that are not known yet."""
    deadline = time.monotonic() + LONG
    while True:
        with suppress(StopIteration):
            if condition():
                return
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def task(service: Service, name: str = "a") -> TaskStatus:
    return next(task for task in service.status().tasks if task.name == name)


def knows(service: Service, name: str) -> bool:
    return any(task.name == name for task in service.status().tasks)


def publish(hub: Hub, name: str, count: int, start: int = 0, announce: bool = True) -> Publisher:
    publisher = Publisher(hub)
    if announce:
        publisher.start(name, classes=2)
    for number in range(start, start + count):
        publisher.publish(name, *batch(number % 7))
    return publisher


def run_in_thread(server: Server) -> tuple[threading.Thread, str]:
    """Run a server in a thread; return it and the address of its page."""
    addresses: Queue[str] = Queue()
    thread = threading.Thread(target=server.run, args=(addresses.put,), daemon=True)
    thread.start()
    return thread, addresses.get(timeout=60)


def saved(settings: ServeSettings) -> dict[str, Any]:
    """The newest checkpoint of a service."""
    return read_checkpoint(settings.state / "learner.safetensors")


def invoked(*words: object) -> Result:
    """What a command gives that ends without an error."""
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == 0, outcome.output
    return outcome


# -- over HTTP

TOKEN = "correct horse"
MAX_BYTES = 20_000
JSON = {"Content-Type": "application/json"}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def http_settings(folder: Path, **http: Any) -> ServeSettings:
    """Settings of a small service with a hub in that folder."""
    return ServeSettings.of(
        {
            "state": folder / "state",
            "source": {"name": "folder", "path": str(folder / "hub")},
            "inputs": {"shape": [4]},
            "learner": {"method": "soro", "memory": "reservoir", "memory_budget": 50, "threads": 1},
            "checkpoint_seconds": 0.2,
            "http": {"port": 0, "max_bytes": MAX_BYTES, **http},
        }
    )


class Answer(NamedTuple):
    """Status, content and headers of an answer."""

    status: int
    content: Any
    headers: Any


class Client:
    """Sends requests to a service, with a token if there is one."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self.token = token

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        mine = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        request = Request(self.address + path, body, mine | (headers or {}), method=method)
        try:
            with urlopen(request, timeout=60) as answer:
                return self._answer(answer)
        except HTTPError as error:
            with error:
                return self._answer(error)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, content: Any = None, headers: dict[str, str] | None = None) -> Answer:
        return self.send("POST", path, json.dumps(content).encode(), JSON | (headers or {}))

    def wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (found := condition()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    def task(self, name: str) -> dict[str, Any] | None:
        return next((task for task in self.get("tasks").content["tasks"] if task["name"] == name), None)

    @staticmethod
    def _answer(answer: Any) -> Answer:
        text = answer.read().decode()
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return Answer(answer.status, json.loads(text) if is_json else text, answer.headers)
