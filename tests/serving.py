"""A service in a thread, with a hub of one's own, and what tests ask of it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from list_hub import ListHub, batch
from spcl.serve import Event, ServeSettings, Service, TaskStatus
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
    deadline = time.monotonic() + LONG
    while not condition():
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
