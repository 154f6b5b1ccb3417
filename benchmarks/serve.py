"""A service against the bare learner on the same batches, the latency of predictions meanwhile, and its memory.

Throughput: batches of many sources wait in a hub in a folder. A service learns them, with all that belongs to it
(reading, decoding, checks, prequential accuracies, checkpoints, copies of the weights, history); the bare learner takes
the same steps on the same batches, which it has in memory. They take turns, in one process; a ratio is the median over
the rounds, by the clock, and in processor time, which a busy machine disturbs less.

Latency: the service is a process of its own and trains without a pause, while one client asks for predictions.

Memory: with --minutes, the resident memory of that process every ten seconds, while sources publish at a steady pace.
Its slope is that of a line through the second half.

    python benchmarks/serve.py [--sources 64] [--rounds 5] [--seconds 20] [--minutes 30]
"""

import argparse
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import linear_regression, median, quantiles
from time import perf_counter, process_time
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor

from spcl.serve import Event, ServeSettings, StepEvent
from spcl.serve.events import History
from spcl.serve.service import Service
from spcl.serve.state import Records, new_learner
from spcl.sources import FolderHub, Publisher

CLASSES, BATCH, WARM_UP = 10, 8, 5
PACE = 1.0  # rounds of all sources a second, while memory is measured
TARGET = 0.9
SHAPES: dict[str, list[int]] = {"mlp": [784], "cnn": [3, 32, 32]}
Batch = tuple[Tensor, Tensor]
Moment = dict[str, Batch]
Times = tuple[float, float]


def settings(folder: Path, backbone: str, **more: Any) -> dict[str, Any]:
    learner = {"method": "soro", "backbone": backbone, "memory": "reservoir", "memory_budget": 1000, "threads": 1}
    return {
        "state": str(folder / "state"),
        "source": {"name": "folder", "path": str(folder / "hub")},
        "inputs": {"shape": SHAPES[backbone]},
        "learner": learner,
        "http": {"port": 0},
        **more,
    }


def new_batch(backbone: str, draws: torch.Generator) -> Batch:
    x = torch.randn(BATCH, *SHAPES[backbone], generator=draws)
    return x, torch.randint(CLASSES, (BATCH,), generator=draws)


def new_moments(backbone: str, sources: int, count: int) -> list[Moment]:
    draws = torch.Generator().manual_seed(0)
    return [{f"source-{source}": new_batch(backbone, draws) for source in range(sources)} for _ in range(count)]


def publish(folder: Path, moments: list[Moment]) -> None:
    publisher = Publisher(FolderHub(folder / "hub"))
    for task in moments[0]:
        publisher.start(task, classes=CLASSES)
    for moment in moments:
        for task, batch in moment.items():
            publisher.publish(task, *batch)


# -- throughput


class Clock:
    """The times at which steps ended."""

    def __init__(self) -> None:
        self.times: list[Times] = []

    def tick(self) -> None:
        self.times.append((perf_counter(), process_time()))

    def per_step(self) -> Times:
        """Seconds a step after the first ones, by the clock and of the processor."""
        steps = len(self.times) - WARM_UP
        first, last = self.times[WARM_UP - 1], self.times[-1]
        return (last[0] - first[0]) / steps, (last[1] - first[1]) / steps


def time_service(backbone: str, moments: list[Moment]) -> Times:
    clock, history = Clock(), History()
    with tempfile.TemporaryDirectory() as name:
        publish(Path(name), moments)

        def on_event(event: Event) -> None:
            history.add(event)
            if isinstance(event, StepEvent):
                clock.tick()
                if len(clock.times) == len(moments):
                    service.stop()

        given = ServeSettings.of(settings(Path(name), backbone, together=True))
        service = Service(given, on_event=on_event, predicts=True)
        service.run()
    return clock.per_step()


def time_learner(backbone: str, moments: list[Moment]) -> Times:
    with tempfile.TemporaryDirectory() as name:
        given = ServeSettings.of(settings(Path(name), backbone))
    learner = new_learner(given.run_settings(), given.inputs, Records())
    for task in moments[0]:
        learner.add_task(task, classes=CLASSES)
    clock = Clock()
    for moment in moments:
        learner.step(moment)
        clock.tick()
    return clock.per_step()


def throughput(backbone: str, sources: int, steps: int, rounds: int) -> list[tuple[Times, Times]]:
    moments = new_moments(backbone, sources, WARM_UP + steps)
    return [(time_service(backbone, moments), time_learner(backbone, moments)) for _ in range(rounds)]


def throughput_table(backbone: str, rounds: list[tuple[Times, Times]], sources: int) -> Table:
    table = Table(title=f"Throughput, {backbone}: {sources} sources × {BATCH} samples, medians of {len(rounds)} rounds")
    for name in ("", "service, batches/s", "learner, batches/s", "ratio", "lowest", "highest", "target", "met"):
        table.add_column(name, justify="right" if name else "left")
    for part, name in enumerate(("by the clock", "in processor time")):
        ratios = [bare[part] / served[part] for served, bare in rounds]
        rates = [f"{sources / median(pair[which][part] for pair in rounds):,.0f}" for which in (0, 1)]
        spread = [f"{ratio:.2f}×" for ratio in (median(ratios), min(ratios), max(ratios))]
        target = (f"≥ {TARGET}×", "yes" if median(ratios) >= TARGET else "no") if part == 0 else ("", "")
        table.add_row(name, *rates, *spread, *target)
    return table


# -- a service as a process


@contextmanager
def running(folder: Path, backbone: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """``spcl serve`` as a process; yields it with its host and port."""
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump(settings(folder, backbone, checkpoint_seconds=2.0)))
    command = [sys.executable, "-m", "spcl", "serve", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        host, _, port = process.stdout.readline().strip().rstrip("/").rpartition("//")[2].partition(":")
        yield process, host, int(port)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class Feeder:
    """Publishes batches of all sources in turn, `pace` rounds a second, in threads."""

    def __init__(self, folder: Path, backbone: str, sources: int, pace: float) -> None:
        self._stop = threading.Event()
        self._publisher = Publisher(FolderHub(folder / "hub"), capacity=200)
        draws = torch.Generator().manual_seed(0)
        self._batches = [new_batch(backbone, draws) for _ in range(16)]
        self._sources, self._pace = sources, pace
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        for source in range(self._sources):
            self._publisher.start(f"source-{source}", classes=CLASSES)
        number = 0
        while not self._stop.wait(1.0 / self._pace):
            for source in range(self._sources):
                self._publisher.publish(f"source-{source}", *self._batches[(number + source) % len(self._batches)])
            number += 1


def latencies(host: str, port: int, body: bytes, seconds: float) -> list[float]:
    """The times of requests, one after the other on one connection, once there is something to predict with."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    found: list[float] = []
    end = None
    while end is None or perf_counter() < end:
        begin = perf_counter()
        connection.request("POST", "/predict?task=source-0", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status == 200:
            end = end or perf_counter() + seconds
            found.append(perf_counter() - begin)
        else:
            time.sleep(0.1)
    connection.close()
    return found


def latency(backbone: str, sources: int, seconds: float) -> Table:
    table = Table(title=f"Latency of /predict, {backbone}: one sample, one client")
    for name in ("the service is", "steps/s", "requests/s", "p50", "p99"):
        table.add_column(name, justify="left" if name == "the service is" else "right")
    body = json.dumps({"inputs": new_batch(backbone, torch.Generator())[0][:1].tolist()}).encode()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, running(Path(name), backbone) as service:
        _, host, port = service
        with Feeder(Path(name), backbone, sources, pace=1000.0):
            latencies(host, port, body, 1.0)  # it trains, and has something to predict with
            table.add_row(f"training on {sources} sources", *measured(host, port, body, seconds))
        while status(host, port)["tasks"][-1]["backlog"]:
            time.sleep(0.5)
        table.add_row("idle", *measured(host, port, body, seconds))
    return table


def measured(host: str, port: int, body: bytes, seconds: float) -> list[str]:
    """Steps and requests a second, and the median and 99th percentile of the requests' times."""
    before = status(host, port)["steps"]
    found = latencies(host, port, body, seconds)
    steps = status(host, port)["steps"] - before
    cuts = quantiles(found, n=100)
    return [f"{steps / seconds:.1f}", f"{len(found) / seconds:.0f}", *(f"{1000 * cuts[at]:.1f} ms" for at in (49, 98))]


def status(host: str, port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("GET", "/tasks")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


# -- memory


def resident_megabytes(process: int) -> float:
    text = Path(f"/proc/{process}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS:"))) / 1024


def memory(console: Console, backbone: str, sources: int, minutes: float) -> None:
    begin, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, running(Path(name), backbone) as service:
        process, host, port = service
        with Feeder(Path(name), backbone, sources, PACE):
            while (passed := time.monotonic() - begin) < 60.0 * minutes:
                time.sleep(10.0)
                found.append((passed / 60.0, resident_megabytes(process.pid)))
                console.print(f"memory after {found[-1][0]:5.1f} min: {found[-1][1]:8.1f} MB")
        steps = status(host, port)["steps"]
    later = found[len(found) // 2 :]
    slope, _ = linear_regression(*zip(*later, strict=True))
    change = 100.0 * slope * minutes / later[0][1]
    console.print(
        f"memory over {minutes:g} minutes, {sources} sources, {steps} steps: "
        f"slope {slope:+.3f} MB a minute in the second "
        f"half, which is {change:+.1f} % in {minutes:g} minutes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=64)
    parser.add_argument("--networks", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=30, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="for which latencies are measured")
    parser.add_argument("--minutes", type=float, default=0.0, help="for which memory is measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    sources = arguments.sources
    for name in arguments.networks:
        found = throughput(name, sources, arguments.steps, arguments.rounds)
        console.print(throughput_table(name, found, sources))
    for name in arguments.networks:
        console.print(latency(name, sources, arguments.seconds))
    if arguments.minutes:
        memory(console, arguments.networks[0], sources, arguments.minutes)


if __name__ == "__main__":
    main()
