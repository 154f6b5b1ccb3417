"""A service on five simulated sensors of different pace: one joins late, one dies and comes back.

Sensors publish to a folder, or with --redis to a redis-server that is started for it. The page shows what the learner
makes of them. Ctrl-C ends everything.

    python examples/serve_demo.py [--redis] [--port 8800]
"""

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spcl.errors import SpclError
from spcl.serve import ServeSettings
from spcl.serve.server import Server
from spcl.sources import FolderHub, Hub, Publisher, RedisHub

FEATURES, BATCH = 16, 32


@dataclass(frozen=True)
class Sensor:
    """Batches per second, classes (0: it measures a number), and the seconds in which it is there."""

    name: str
    pace: float
    classes: int
    there: tuple[tuple[float, float], ...] = ((0.0, float("inf")),)


SENSORS = (
    Sensor("camera", 20.0, 6),
    Sensor("radar", 8.0, 4, ((0.0, 20.0), (35.0, float("inf")))),  # dies, and comes back
    Sensor("lidar", 4.0, 5),
    Sensor("microphone", 2.0, 3, ((15.0, float("inf")),)),  # joins late
    Sensor("thermometer", 1.0, 0),
)


class World:
    """What a sensor sees: clusters of points, or a number that depends on a point."""

    def __init__(self, sensor: Sensor) -> None:
        self.draws = torch.Generator().manual_seed(sum(sensor.name.encode()))
        self.centres = 0.6 * torch.randn(max(sensor.classes, 1), FEATURES, generator=self.draws)
        self.classes = sensor.classes

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(BATCH, FEATURES, generator=self.draws)
        if not self.classes:
            return x, (x @ self.centres.T).tanh()
        y = torch.randint(self.classes, (BATCH,), generator=self.draws)
        return x + self.centres[y], y


def live(sensor: Sensor, publisher: Publisher, begin: float, stop: threading.Event) -> None:
    """Publish batches at the sensor's pace while it is there."""
    world = World(sensor)
    for number, (first, last) in enumerate(sensor.there):
        if stop.wait(max(0.0, begin + first - time.monotonic())):
            return
        if number == 0:
            kind = "classification" if sensor.classes else "regression"
            publisher.start(sensor.name, kind=kind, classes=sensor.classes or 1)
        while time.monotonic() < begin + last:
            publisher.publish(sensor.name, *world.batch())
            if stop.wait(1.0 / sensor.pace):
                return


def hub_of(source: dict[str, object]) -> Hub:
    return RedisHub(str(source["url"])) if source["name"] == "redis" else FolderHub(str(source["path"]))


def publish(sensor: Sensor, source: dict[str, object], begin: float, stop: threading.Event) -> None:
    with closing(hub_of(source)) as hub:
        live(sensor, Publisher(hub, capacity=200), begin, stop)


@contextmanager
def sensors(source: dict[str, object]) -> Iterator[None]:
    """The sensors, in threads; one that waits for space in the hub ends with the program."""
    begin, stop = time.monotonic(), threading.Event()
    options = [(sensor, source, begin, stop) for sensor in SENSORS]
    threads = [threading.Thread(target=publish, args=each, daemon=True) for each in options]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(1.0)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A redis-server of its own, whose data are in a folder."""
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("redis-server is not installed; leave --redis out")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes"]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()


def settings(folder: Path, source: dict[str, object], port: int) -> dict[str, object]:
    return {
        "state": str(folder / "state"),
        "source": source,
        "inputs": {"shape": [FEATURES]},
        "learner": {"method": "soro", "memory": "reservoir", "memory_budget": 500, "stability": True, "threads": 1},
        "tasks": {"silence_seconds": 5.0},
        "checkpoint_seconds": 3.0,
        "http": {"port": port},
    }


def has_screen() -> bool:
    try:
        return not isinstance(webbrowser.get(), webbrowser.GenericBrowser)  # text browsers would take the terminal
    except webbrowser.Error:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", action="store_true", help="publish to a redis-server instead of a folder")
    parser.add_argument("--port", type=int, default=8800, help="of the page; 0 for any free one")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spcl-demo-", ignore_cleanup_errors=True)))
        source: dict[str, object] = {"name": "folder", "path": str(folder / "hub")}
        if arguments.redis:
            source = {"name": "redis", "url": stack.enter_context(redis_server(folder))}

        def ready(address: str) -> None:
            print(f"the page is at {address} (Ctrl-C ends the demo)", flush=True)
            stack.enter_context(sensors(source))
            if has_screen():
                webbrowser.open(address)

        Server(ServeSettings.of(settings(folder, source, arguments.port))).run(ready)
    print("saved and stopped")


if __name__ == "__main__":
    try:
        main()
    except SpclError as error:
        sys.exit(f"error: {error}")
