"""Kill services, publishers, Redis and grids at random, fill the disk, flood the port; then check what was learned.

A round serves three tasks from a hub (a folder or Redis, in turns) whose publishers never stop, and disturbs everything
with SIGKILL, a full disk and floods of half-sent requests. Then the tasks end, the service finishes, and its checkpoint
is read. The memory is large enough for every sample, so the checkpoint says which batches were learned, and how often:

- Every batch was learned once, also those whose publisher was killed while it waited for the answer, and which the next
  process published again under the same number.
- Where the order of batches is determined (``together``), weights, optimizer, memory and random state are
  bit for bit what a service has that learned the same batches undisturbed.
- A grid that is killed meanwhile, or whose workers are, ends with the results and metrics of an undisturbed one.

Everything runs on loopback, in a temporary folder and on one core. The disk is a tmpfs, which needs root; without, the
disk is not filled, and the table says so.

    python benchmarks/chaos.py --minutes 60 [--seed 0] [--out FILE]
"""

import argparse
import ctypes
import functools
import importlib
import json
import math
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from spcl.sources import FolderHub, Hub, Publisher, RedisHub

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from _runs import metrics_in, results_in
from redis_process import RedisProcess
from small_benchmark import write_benchmark

TASKS = ("left", "ring", "upper")
SAMPLES = 4
LEARNER = {
    "backbone": {"name": "mlp", "hidden": [16]},
    "memory": "reservoir",
    "memory_budget": 100_000,  # holds every sample: the record of what was learned
    "threads": 1,
}
PAUSE = 0.03  # seconds between two batches of a publisher
CAPACITY = 60
ROUND_SECONDS = 40.0
PATIENCE = 180.0  # seconds for whatever must happen on a busy machine
PATIENCE_FULL = 5.0  # seconds within which a service may end because the disk was full
DISK_BYTES = 24 * 2**20
FLOOD = 400
GRID_KILLS = 3
GRID = ["--methods=er,soro", "--configs=0-1", "--seeds=0", "--jobs=2", "--retries=9"]
GRID_SETTINGS = {"tasks": 3, "batch_size": 8, "memory_budget": 24, "threads": 1, "checkpoint_seconds": 0.0}
WEIGHTS = ("backbone.", "tasks.", "optimizer.", "memory.", "random.torch")
KILLED = ("services", "publishers", "Redis", "grids", "workers of grids")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

prctl = ctypes.CDLL(None).prctl


# -- processes


class Processes:
    """Forks of this process, which has all modules loaded; known by their ids; none outlives this one."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._status: dict[int, int | None] = {}

    def start(self, work: Callable[[], object]) -> int:
        process = os.fork()
        if process == 0:
            self._be_child(work)
        self._status[process] = None
        return process

    def command(self, *arguments: str) -> int:
        """Start ``spcl`` with arguments."""
        return self.start(functools.partial(run_spcl, arguments))

    def status(self, process: int) -> int | None:
        """Return the exit status of a process; a negative signal, and None while it lives."""
        if self._status[process] is None:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                self._status[process] = os.waitstatus_to_exitcode(status)
        return self._status[process]

    def kill(self, process: int) -> bool:
        """Kill a process; return whether it was alive."""
        if self.status(process) is not None:
            return False
        os.kill(process, signal.SIGKILL)
        self.wait(process)
        return True

    def wait(self, process: int) -> int:
        """Return the exit status of a process that ends by itself."""
        until(lambda: self.status(process) is not None, f"process {process} does not end")
        return self._status[process] or 0

    def do(self, work: Callable[[], object]) -> None:
        """Do the work in a process, and wait for it."""
        status = self.wait(self.start(work))
        assert status == 0, f"a process ended with {status}; see {self.log}"

    def close(self) -> None:
        """Kill all that are left, and the children that killed ones left behind."""
        while left := children_of(os.getpid()):
            for process in left:
                for each in (*descendants_of(process), process):
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(process, 0)

    def bury_orphans(self) -> None:
        """Take the status of ended children of processes that were killed, which became ours."""
        for process in children_of(os.getpid()):
            if process not in self._status and state_of(process) == "Z" and name_of(process) != "redis-server":
                with suppress(ChildProcessError):
                    os.waitpid(process, os.WNOHANG)

    def _be_child(self, work: Callable[[], object]) -> NoReturn:
        status = 1
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            os.closerange(3, 4096)
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def run_spcl(arguments: tuple[str, ...]) -> None:
    sys.argv = ["spcl", *arguments]
    runpy.run_module("spcl", run_name="__main__", alter_sys=True)


def run_and_list_modules(arguments: tuple[str, ...], path: Path) -> None:
    try:
        run_spcl(arguments)
    finally:
        path.write_text("\n".join(sys.modules))


def load_modules(path: Path) -> None:
    """Import what a command has imported, so that forks start within a moment."""
    for name in path.read_text().splitlines():
        if name.partition(".")[0] not in ("__main__", "__mp_main__", "google"):
            with suppress(Exception):
                importlib.import_module(name)


def children_of(process: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def descendants_of(process: int) -> list[int]:
    return [each for child in children_of(process) for each in (*descendants_of(child), child)]


def stat_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "0 () X"


def state_of(process: int) -> str:
    return stat_of(process).rpartition(")")[2].split()[0]


def name_of(process: int) -> str:
    return stat_of(process).partition("(")[2].rpartition(")")[0]


def until(condition: Callable[[], object], otherwise: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{otherwise} within {PATIENCE:.0f} s")
        time.sleep(0.02)


# -- batches and their publishers


def batch(task: str, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + TASKS.index(task))
    x = torch.randn(SAMPLES, 2, generator=generator)
    targets = {"left": x[:, 0] > 0, "ring": x.norm(dim=1) > 1, "upper": x[:, 1] > 0}
    return x, targets[task].long()


class Journal:
    """A file in which a publisher notes what it is about to publish, and what it has published."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, what: str, number: int) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(f"{what} {number}\n".encode())

    def numbers(self, what: str) -> list[int]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(what)]


def publish(open_hub: Callable[[], Hub], task: str, journal: Journal, stop: Path) -> None:
    """Publish batches where an earlier process stopped, until told to stop."""
    publisher = Publisher(open_hub(), capacity=CAPACITY, name=f"publisher-of-{task}")
    number = max(journal.numbers("done"), default=-1) + 1
    while not stop.exists():
        journal.note("begin", number)
        persist(functools.partial(publisher.publish, task, *batch(task, number), number))
        journal.note("done", number)
        number += 1
        time.sleep(PAUSE)
    persist(functools.partial(publisher.end, task))


def persist(action: Callable[[], object]) -> None:
    """Try again while the disk is full."""
    while True:
        try:
            action()
        except OSError as error:
            print(f"publishing failed: {error}", flush=True)
            time.sleep(0.1)
        else:
            return


def announce(open_hub: Callable[[], Hub]) -> None:
    publisher = Publisher(open_hub())
    for task in TASKS:
        publisher.start(task, classes=2)


def publish_all(open_hub: Callable[[], Hub], numbers: dict[str, list[int]]) -> None:
    announce(open_hub)
    publisher = Publisher(open_hub())
    for task, some in numbers.items():
        for number in some:
            publisher.publish(task, *batch(task, number))
        publisher.end(task)


# -- a service


class Serving:
    """A service as a process of its own, which is started again whenever it was killed."""

    def __init__(self, processes: Processes, folder: Path, source: dict[str, Any], together: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.state = folder / "state"
        self.config = folder.parent / f"{folder.name}.yaml"
        self._processes = processes
        settings = {
            "state": str(self.state),
            "source": source,
            "inputs": {"shape": [2]},
            "learner": LEARNER,
            "together": together,
            "checkpoint_seconds": 0.1,
            "http": {"port": self.port},
        }
        self.config.write_text(yaml.safe_dump(settings))
        self.process = 0

    def start(self) -> None:
        self.process = self._processes.command("serve", str(self.config))

    def get(self, path: str) -> dict[str, Any] | None:
        """Return what the service answers; None if it does not, or not with 200."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20.0)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            content = answer.read()
            return dict(json.loads(content)) if answer.status == 200 else None
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()

    def steps(self) -> int:
        found = self.get("/tasks")
        return -1 if found is None else int(found["steps"])

    def has_finished(self) -> bool:
        tasks = (self.get("/tasks") or {}).get("tasks", [])
        return len(tasks) == len(TASKS) and all(task["state"] == "finished" for task in tasks)

    def finish(self) -> list[dict[str, Any]]:
        """Wait until all tasks have ended, stop the service, and return its status of the tasks."""
        until(self.has_finished, f"the tasks do not finish: {self.get('/tasks')}")
        tasks = list((self.get("/tasks") or {})["tasks"])
        os.kill(self.process, signal.SIGTERM)
        status = self._processes.wait(self.process)
        assert status == 0, f"a service that was stopped by SIGTERM ended with {status}"
        return tasks

    def checkpoint(self) -> dict[str, Tensor]:
        return load_file(self.state / "learner.safetensors")


def learned(checkpoint: dict[str, Tensor]) -> dict[str, Counter[int]]:
    """Return how often each batch of every task is in the memory, which forgets nothing."""
    rows = [
        tuple(row)
        for name, tensor in checkpoint.items()
        if name.startswith("memory.") and name.endswith(".x")
        for row in tensor.tolist()
    ]
    found = {task: Counter[int]() for task in TASKS}
    samples, known = Counter(rows), 0
    for task in TASKS:
        number, missing = 0, 0
        while missing < 200:  # numbers of batches that were never published are few
            counts = {samples[tuple(row)] for row in batch(task, number)[0].tolist()}
            assert len(counts) == 1, f"a part of batch {number} of {task} was learned"
            times = counts.pop()
            found[task] += Counter({number: times})
            known += SAMPLES * times
            missing = 0 if times else missing + 1
            number += 1
    assert known == len(rows), f"{len(rows) - known} samples in the memory were never published"
    return found


def undisturbed(processes: Processes, folder: Path, numbers: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the checkpoint of a service that nobody disturbs, after the same batches."""
    folder.mkdir()
    hub = folder / "hub"
    processes.do(lambda: publish_all(lambda: FolderHub(hub), numbers))
    service = Serving(processes, folder / "service", {"name": "folder", "path": str(hub)}, together=True)
    service.start()
    service.finish()
    return service.checkpoint()


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    chosen = [{name for name in each if name.startswith(WEIGHTS)} for each in (one, other)]
    return chosen[0] == chosen[1] and all(torch.equal(one[name], other[name]) for name in chosen[0])


# -- the disk


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system; yield whether that is allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    can = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield can
    finally:
        if can:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, seconds: float) -> None:
    path = folder / "filler"
    try:
        with suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        time.sleep(seconds)
    finally:
        path.unlink(missing_ok=True)


# -- the record


def origin() -> str:
    """Return versions, date and commit."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    return f"one core, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, commit {commit}"


class Record:
    """What was done and found so far."""

    def __init__(self, seed: int, minutes: float) -> None:
        self.seed = seed
        self.minutes = minutes
        self.begin = time.monotonic()
        self.done: Counter[str] = Counter()
        self.slowest_answer = 0.0
        self.problems: list[str] = []
        self.origin = f"python benchmarks/chaos.py --minutes {minutes:g} --seed {seed}; {origin()}"
        self.notes: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(text)
        print(f"\nPROBLEM: {text}", flush=True)

    def show_progress(self, now: str) -> None:
        minutes = (time.monotonic() - self.begin) / 60
        kills = sum(self.done[f"{name} killed"] for name in KILLED)
        found = f"{self.done['batches learned']:,} batches, lost {self.done['lost']}, twice {self.done['twice']}"
        text = (
            f"{minutes:5.1f} of {self.minutes:.0f} min: {kills:,} kills, {found}, problems {len(self.problems)}; {now}"
        )
        end = "\r" if sys.stdout.isatty() else "\n"
        if sys.stdout.isatty() or time.monotonic() - getattr(self, "_shown", 0.0) > 30.0:
            self._shown = time.monotonic()
            print(text[:118].ljust(118), end=end, flush=True)

    def table(self) -> Table:
        minutes = (time.monotonic() - self.begin) / 60
        table = Table(
            title=f"{minutes:.0f} minutes of chaos, seed {self.seed}", title_justify="left", show_header=False
        )
        table.add_column("")
        table.add_column("", justify="right")
        for name, value in self._rows():
            table.add_row(name, value)
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        for name in KILLED:
            yield f"{name} killed by SIGKILL", f"{self.done[f'{name} killed']:,}"
        yield "times that the disk was filled", f"{self.done['disks filled']:,}"
        yield "  service starts that failed because it was full", f"{self.done['services refused']:,}"
        yield "floods of connections", f"{self.done['floods']:,}"
        yield "  connections opened", f"{self.done['connections']:,}"
        yield (
            "  requests to /healthz meanwhile, answered with 200",
            f"{self.done['answered']:,} of {self.done['asked']:,}",
        )
        yield "  slowest answer", f"{self.slowest_answer:.1f} s"
        yield "rounds", f"{self.done['rounds']:,}"
        yield "batches published", f"{self.done['batches published']:,}"
        yield "  published a second time because the publisher was killed", f"{self.done['sent again']:,}"
        yield "batches learned", f"{self.done['batches learned']:,}"
        yield "batches lost", f"{self.done['lost']:,}"
        yield "batches learned twice", f"{self.done['twice']:,}"
        yield "batches refused or late", f"{self.done['refused']:,}"
        equal = f"{self.done['equal']:,} of {self.done['compared']:,}"
        yield "services equal to an undisturbed one, bit for bit", equal
        yield "runs of grids equal to undisturbed ones", f"{self.done['runs equal']:,} of {self.done['runs']:,}"
        yield "problems", f"{len(self.problems):,}"

    def write(self, path: Path | None) -> None:
        """Write the table to a file, or print it."""
        with ExitStack() as stack:
            file = None if path is None else stack.enter_context(path.open("w", encoding="utf-8"))
            console = Console(file=file, width=100, highlight=False)
            console.print(f"# {self.origin}", soft_wrap=True)
            console.print(self.table())
            for text in (*self.notes, *(f"problem: {each}" for each in self.problems)):
                console.print(text, markup=False)


# -- rounds


class ServiceRound:
    """Serves while everything is disturbed, then checks what was learned."""

    def __init__(
        self,
        record: Record,
        processes: Processes,
        chance: random.Random,
        work: Path,
        disk: Path | None,
        redis: RedisProcess | None,
    ) -> None:
        self.record, self.processes, self.chance, self.disk, self.redis = record, processes, chance, disk, redis
        self.name = f"round-{record.done['rounds']}"
        self.work = work / self.name
        self.work.mkdir()
        state = (disk or work) / f"{self.name}-service"
        state.mkdir()
        hub = state / "hub"
        self.together = chance.random() < 0.7
        source = {"name": "folder", "path": str(hub)}
        self.open_hub: Callable[[], Hub] = lambda: FolderHub(hub)
        if redis is not None:
            source = {"name": "redis", "url": redis.url, "prefix": self.name}
            self.open_hub = lambda: RedisHub(redis.url, self.name)
        self.folder = state
        self.service = Serving(processes, state, source, self.together)
        self.stop = self.work / "stop"
        self.journals = {task: Journal(self.work / f"{task}.journal") for task in TASKS}
        self.publishers: dict[str, int] = {}
        self.disk_was_full = -math.inf

    def run(self) -> None:
        self.processes.do(lambda: announce(self.open_hub))
        self.service.start()
        for task in TASKS:
            self._start_publisher(task)
        actions = {self._kill_service: 10, self._kill_publisher: 4, self._flood: 2}
        if self.redis is not None:
            actions[self._kill_redis] = 2
        if self.disk is not None:
            actions[self._fill_disk] = 2
        end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < end:
            self._live()
            self.chance.choices(list(actions), list(actions.values()))[0]()
            self._mend()
            kind = "folder" if self.redis is None else "redis"
            self.record.show_progress(f"{self.name}: {kind}{', together' if self.together else ''}")
        self.stop.touch()
        for task, process in self.publishers.items():
            status = self.processes.wait(process)
            assert status == 0, f"the publisher of {task} ended with {status}"
        self._mend()
        self.check(self.service.finish())
        shutil.rmtree(self.folder)

    def check(self, status: list[dict[str, Any]]) -> None:
        done, checkpoint = self.record.done, self.service.checkpoint()
        found = learned(checkpoint)
        for task, journal in self.journals.items():
            begun, published = journal.numbers("begin"), journal.numbers("done")
            times = found[task]
            done["batches published"] += len(published)
            done["sent again"] += len(begun) - len(published)
            done["batches learned"] += sum(count > 0 for count in times.values())
            self._count("lost", task, [number for number in published if times[number] == 0])
            self._count("twice", task, [number for number, count in times.items() if count > 1])
            assert {number for number, count in times.items() if count} <= set(begun)
        for each in status:
            expected = found[each["name"]].total()
            if each["batches"] != expected:
                self.record.problem(f"{self.name}: {expected} batches were learned, but the status says {each}")
            refused = int(each["dead_letters"]) + int(each["late"])
            done["refused"] += refused
            if refused:
                self.record.problem(f"{self.name}: messages were refused or late: {each}")
        if self.together:
            numbers = {task: sorted(times.elements()) for task, times in found.items()}
            done["compared"] += 1
            if are_equal(checkpoint, undisturbed(self.processes, self.work / "undisturbed", numbers)):
                done["equal"] += 1
            else:
                self.record.problem(f"{self.name}: the weights differ from the undisturbed ones")

    def _count(self, what: str, task: str, numbers: list[int]) -> None:
        self.record.done[what] += len(numbers)
        if numbers:
            self.record.problem(f"{self.name}: {what} of {task}: {numbers[:10]}")

    def _start_publisher(self, task: str) -> None:
        journal = self.journals[task]
        self.publishers[task] = self.processes.start(lambda: publish(self.open_hub, task, journal, self.stop))

    def _live(self) -> None:
        """Wait for a random time: one time in five from now on, else from the next step on."""
        if self.chance.random() < 0.8:
            before = self.service.steps()
            until(lambda: self._lives() and self.service.steps() > max(before, 0), "the service takes no step")
        time.sleep(self.chance.uniform(0.0, 0.4))

    def _lives(self) -> bool:
        self._mend()
        return True

    def _mend(self) -> None:
        """Start the service again if it has ended."""
        self.processes.bury_orphans()
        status = self.processes.status(self.service.process)
        if status is not None:
            if status != -signal.SIGKILL:
                self.record.done["services refused"] += 1
                if status < 0 or time.monotonic() > self.disk_was_full + PATIENCE_FULL:
                    self.record.problem(f"{self.name}: a service ended by itself with {status}")
            self.service.start()

    def _kill_service(self) -> None:
        self.record.done["services killed"] += self.processes.kill(self.service.process)

    def _kill_publisher(self) -> None:
        task = self.chance.choice(TASKS)
        assert self.processes.kill(self.publishers[task]), f"the publisher of {task} ended by itself"
        self.record.done["publishers killed"] += 1
        self._start_publisher(task)

    def _kill_redis(self) -> None:
        assert self.redis is not None
        self.redis.kill()
        self.record.done["Redis killed"] += 1
        time.sleep(self.chance.uniform(0.0, 0.5))
        self.redis.start()

    def _fill_disk(self) -> None:
        assert self.disk is not None
        self.record.done["disks filled"] += 1
        seconds = self.chance.uniform(0.1, 1.5)
        filling = self.processes.start(lambda: fill(self.disk or Path(), seconds))
        if self.chance.random() < 0.5:
            time.sleep(self.chance.uniform(0.0, seconds))
            self._kill_service()
            self._mend()
        self.processes.wait(filling)
        self.disk_was_full = time.monotonic()

    def _flood(self) -> None:
        """Open connections that send half a request, nonsense, or a whole one without reading; ask for health."""
        until(lambda: self._lives() and self.service.get("/healthz"), "the service does not answer")
        self.record.done["floods"] += 1
        texts = (b"GET /tasks HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n" * 9)
        with ExitStack() as stack:
            for number in range(FLOOD):
                with suppress(OSError):  # the service has ended the connection
                    opened = socket.create_connection(("127.0.0.1", self.service.port), timeout=5.0)
                    stack.enter_context(opened).sendall(texts[number % 3])
                self.record.done["connections"] += 1
                if number % 100 == 99:
                    begin = time.monotonic()
                    self.record.done["asked"] += 1
                    if self.service.get("/healthz") is not None:
                        self.record.done["answered"] += 1
                    elif self.processes.status(self.service.process) is None:
                        self.record.problem(f"{self.name}: /healthz gives no 200 within a flood")
                    self.record.slowest_answer = max(self.record.slowest_answer, time.monotonic() - begin)


class GridRound:
    """Makes a small grid, which is killed or loses workers at random, and compares its runs."""

    def __init__(self, record: Record, processes: Processes, chance: random.Random, folder: Path) -> None:
        self.record, self.processes, self.chance = record, processes, chance
        self.benchmark, self.expected = folder / "clusters.npz", folder / "grid-undisturbed"
        self.out = folder / f"grid-{record.done['rounds']}"

    def command(self, out: Path) -> tuple[str, ...]:
        settings = [f"--set={name}={value}" for name, value in GRID_SETTINGS.items()]
        return ("grid", f"--benchmark={self.benchmark}", f"--out={out}", "--device=cpu", *GRID, *settings)

    def run(self) -> None:
        process = self.processes.command(*self.command(self.out))
        for _ in range(GRID_KILLS):
            end = time.monotonic() + self.chance.uniform(0.0, 8.0)
            while time.monotonic() < end and self.processes.status(process) is None:
                time.sleep(0.05)
                self.record.show_progress(self.out.name)
            if self.processes.status(process) is not None:
                break
            workers = [each for each in descendants_of(process) if state_of(each) != "Z"]
            if self.chance.random() < 0.5 and workers:
                with suppress(ProcessLookupError):
                    os.kill(self.chance.choice(workers), signal.SIGKILL)
                    self.record.done["workers of grids killed"] += 1
            else:
                self.record.done["grids killed"] += self.processes.kill(process)
                process = self.processes.command(*self.command(self.out))
        status = self.processes.wait(process)
        for _ in range(2):  # a run that failed because its worker was killed is made by the same command
            if status != 0:
                status = self.processes.wait(self.processes.command(*self.command(self.out)))
        self.processes.bury_orphans()
        self.check(status)
        shutil.rmtree(self.out, ignore_errors=True)

    def check(self, status: int) -> None:
        expected, found = results_in(self.expected), results_in(self.out)
        lines = metrics_in(self.expected), metrics_in(self.out)
        self.record.done["runs"] += len(expected)
        same = [run for run in expected if found.get(run) == expected[run] and lines[0][run] == lines[1].get(run)]
        self.record.done["runs equal"] += len(same)
        if status != 0 or len(same) < len(expected) or list(self.out.rglob("failure.json")):
            other = sorted(set(expected) - set(same))
            self.record.problem(f"{self.out.name} ended with {status}; runs that differ or are missing: {other}")
            shutil.copytree(self.out, f"{self.out}-problem", dirs_exist_ok=True)


def prepare(processes: Processes, folder: Path, grid: GridRound) -> None:
    """Make what is compared with, and load what the commands have loaded."""
    write_benchmark(grid.benchmark)
    names = folder / "modules"
    assert processes.wait(processes.start(lambda: run_and_list_modules(grid.command(grid.expected), names))) == 0
    load_modules(names)
    hub = folder / "first-hub"
    service = Serving(processes, folder / "first", {"name": "folder", "path": str(hub)}, together=True)
    processes.do(lambda: publish_all(lambda: FolderHub(hub), {task: [0, 1] for task in TASKS}))
    service.process = processes.start(lambda: run_and_list_modules(("serve", str(service.config)), names))
    service.finish()
    load_modules(names)


def chaos(record: Record, chance: random.Random, folder: Path, out: Path | None) -> None:
    with ExitStack() as stack:
        processes = Processes(folder / "log")
        stack.callback(processes.close)
        disk: Path | None = folder / "disk"
        if not stack.enter_context(small_disk(folder / "disk")):
            disk = None
            record.notes.append("The disk was not filled: mounting a small one needs root.")
        redis = None
        if shutil.which("redis-server") is None:
            record.notes.append("Without Redis: there is no redis-server.")
        else:
            (folder / "redis").mkdir()
            redis = stack.enter_context(RedisProcess(folder / "redis"))
        prepare(processes, folder, GridRound(record, processes, chance, folder))
        record.begin = time.monotonic()
        end = record.begin + 60 * record.minutes
        while time.monotonic() < end and len(record.problems) < 20:
            turn = redis if record.done["rounds"] % 2 == 1 else None
            service = functools.partial(ServiceRound, record, processes, chance, folder, disk, turn)
            grid = functools.partial(GridRound, record, processes, chance, folder)
            for make in (service, grid):
                try:
                    make().run()
                except (AssertionError, OSError) as error:
                    record.problem(f"round {record.done['rounds']}: {error!r}")
            record.done["rounds"] += 1
            if out is not None:
                record.write(out)


def stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the table, written after every round")
    parser.add_argument("--keep", action="store_true", help="keep the folder, for a look at what went wrong")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a fork must not wait for threads that it does not have
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, stop)
    record = Record(arguments.seed, arguments.minutes)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        chaos(record, random.Random(arguments.seed), folder, arguments.out)
    except KeyboardInterrupt:
        record.notes.append("Stopped before the end.")
    finally:
        record.write(None)
        if arguments.out is not None:
            record.write(arguments.out)
        if arguments.keep or record.problems:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder)
    return 1 if record.problems else 0


if __name__ == "__main__":
    sys.exit(main())
