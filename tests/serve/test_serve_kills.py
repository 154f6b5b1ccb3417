"""A service that is killed at random moments learns every batch exactly once, also when Redis is killed.

Publisher, service and a real redis-server (with its append-only file) are processes of their own; the service, and now
and then Redis, get SIGKILL. Compared bit for bit: the killed service, one that nobody disturbs, and a plain loop over
`Learner.step` on the same batches.

    PYTHONPATH=src:tests/support python tests/serve/test_serve_kills.py [--seed 0] [--kills 50]
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redis_process import RedisProcess, needs_redis
from spcl.checkpoint import read_newest
from spcl.learner import Learner
from spcl.runs.build import learner_parts
from spcl.serve import Event, ServeSettings, Service, StepEvent
from spcl.sources import Publisher, RedisHub

KILLS, KILLS_PER_REDIS_KILL = 16, 8
LIMIT_SECONDS = 240
TASKS = ("left", "ring", "upper")
LEARNER = {"backbone": {"name": "mlp", "hidden": [16]}, "memory_budget": 60, "threads": 1}
CAPACITY = 60
STARTING, LEARNING = (0.0, 0.3), (0.0, 0.3)  # seconds that a life goes on after its beginning, or its first step


def batch(task: str, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + TASKS.index(task))
    x = torch.randn(8, 2, generator=generator)
    targets = {"left": x[:, 0] > 0, "ring": x.norm(dim=1) > 1, "upper": x[:, 1] > 0}
    return x, targets[task].long()


def settings_of(folder: Path, redis: RedisProcess, prefix: str) -> ServeSettings:
    return ServeSettings.of(
        {
            "state": str(folder / prefix),
            "source": {"name": "redis", "url": redis.url, "prefix": prefix},
            "inputs": {"shape": [2]},
            "learner": LEARNER,
            "together": True,
            "checkpoint_seconds": 0.05,
        }
    )


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Do the work in a process that shares the modules that are loaded; yield its id, and wait for it."""
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException as error:
            print(f"error in a process: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    try:
        yield process
        _, status = os.waitpid(process, 0)
    except BaseException:
        os.kill(process, signal.SIGKILL)
        raise
    assert status in (0, signal.SIGKILL), f"a process ended with {status}"


def publish(url: str, prefix: str, enough: Callable[[int], bool]) -> int:
    """Publish rounds of one batch per task until there are enough; return their number."""
    publisher = Publisher(RedisHub(url, prefix), capacity=CAPACITY)
    rounds = 0
    while not enough(rounds):
        for task in TASKS:
            publisher.publish(task, *batch(task, rounds))
        rounds += 1
    for task in TASKS:
        publisher.end(task)
    return rounds


def serve(settings: ServeSettings) -> None:
    """Serve until every task has ended; every step adds a byte to a file."""
    with steps_file(settings).open("ab", buffering=0) as steps:

        def on_event(event: Event) -> None:
            if isinstance(event, StepEvent):
                steps.write(b".")
            elif ended(service):
                service.stop()

        service = Service(settings, on_event=on_event)
        service.run()


def steps_file(settings: ServeSettings) -> Path:
    return settings.state.with_suffix(".steps")


def steps_taken(settings: ServeSettings) -> int:
    path = steps_file(settings)
    return path.stat().st_size if path.exists() else 0


def ended(service: Service) -> bool:
    tasks = service.status().tasks
    return len(tasks) == len(TASKS) and all(task.state == "finished" for task in tasks)


def announce(redis: RedisProcess, prefix: str) -> None:
    publisher = Publisher(RedisHub(redis.url, prefix))
    for task in TASKS:
        publisher.start(task, classes=2)


def first_positions(redis: RedisProcess, prefix: str) -> dict[str, int]:
    """Return the numbers of the announcements."""
    found = RedisHub(redis.url, prefix).read(dict.fromkeys(TASKS), 1, 0.0, 2**20)
    return {task: int(entries[0][0].partition("-")[0]) for task, entries in found.items()}


def disturbed(folder: Path, redis: RedisProcess, seed: int, kills: int) -> int:
    """Serve with kills at random moments; return the rounds that were published."""
    settings, chance = settings_of(folder, redis, "disturbed"), random.Random(seed)
    announce(redis, "disturbed")
    (folder / "first").write_text(json.dumps(first_positions(redis, "disturbed")))
    stop, count = folder / "stop", folder / "rounds"
    redis_turns = set(chance.sample(range(kills), kills // KILLS_PER_REDIS_KILL))

    def publishing() -> None:
        count.write_text(str(publish(redis.url, "disturbed", lambda _: stop.exists())))

    with forked(publishing):
        for turn in range(kills):
            with forked(lambda: serve(settings)) as process:
                live(settings, chance)
                if turn in redis_turns:
                    redis.kill()
                    time.sleep(chance.uniform(0.05, 0.3))
                    redis.start()
                    live(settings, chance)
                os.kill(process, signal.SIGKILL)
        stop.touch()
        with forked(lambda: serve(settings)):
            pass
    return int(count.read_text())


def live(settings: ServeSettings, chance: random.Random) -> None:
    """Wait for a random time: one time in five from now on, else from the next step on."""
    if chance.random() < 0.2:
        time.sleep(chance.uniform(*STARTING))
        return
    before = steps_taken(settings)
    while steps_taken(settings) == before:
        time.sleep(0.005)
    time.sleep(chance.uniform(*LEARNING))


def undisturbed(folder: Path, redis: RedisProcess, rounds: int) -> None:
    settings = settings_of(folder, redis, "undisturbed")
    announce(redis, "undisturbed")
    with (
        forked(lambda: publish(redis.url, "undisturbed", lambda done: done == rounds)),
        forked(lambda: serve(settings)),
    ):
        pass


def plain_loop(settings: ServeSettings, rounds: int, path: Path) -> None:
    torch.set_num_threads(1)
    run_settings = settings.run_settings()
    torch.manual_seed(run_settings.seed)
    parts = learner_parts(run_settings, [settings.inputs.spec()], torch.device("cpu"), steps=1)
    learner = Learner(**parts, measure_stability=run_settings.stability, seed=run_settings.seed)
    for task in TASKS:
        learner.add_task(task, classes=2)
    for number in range(rounds):
        learner.step({task: batch(task, number) for task in TASKS})
    for task in TASKS:
        learner.finish_task(task)
    learner.save(path)


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two states differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{where}[{index}]")]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if torch.equal(one, other) else [where]
    return [] if one == other else [where]


LEARNED = ("tasks", "backbone", "method", "optimizer", "memory")


def hang(*_: object) -> None:
    raise TimeoutError("a process hangs")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=KILLS)
    given = parser.parse_args()
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT_SECONDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        redis, begin = RedisProcess(folder), time.monotonic()
        try:
            plain_loop(settings_of(folder, redis, "none"), 2, folder / "none")  # forks then have all modules loaded
            rounds = disturbed(folder, redis, given.seed, given.kills)
            undisturbed(folder, redis, rounds)
        finally:
            redis.kill()
        plain_loop(settings_of(folder, redis, "undisturbed"), rounds, folder / "plain")
        services = [folder / each / "learner.safetensors" for each in ("disturbed", "undisturbed")]
        states = [read_newest(path) for path in (*services, folder / "plain")]
        steps = steps_taken(settings_of(folder, redis, "disturbed"))
        redis_kills = given.kills // KILLS_PER_REDIS_KILL
        print(f"{given.kills} SIGKILLs of the service, {redis_kills} of Redis, seed {given.seed}:")
        print(f"{len(TASKS)} tasks of {rounds} batches, {time.monotonic() - begin:.0f} s;", end=" ")
        print(f"{steps} steps; {steps - rounds} were not in a checkpoint when the service was killed")
        return report(rounds, states, json.loads((folder / "first").read_text()))


def learned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in LEARNED} | {"random": state["random"]["torch"]}


def report(rounds: int, states: list[dict[str, Any]], first: dict[str, int]) -> int:
    killed, quiet, plain = states
    stream, service = killed["sources"]["stream"], killed["sources"]["service"]
    last = {task: f"{number + rounds}-0" for task, number in first.items()}
    checks = {
        "batches delivered, of every task": set(stream["delivered"].values()) == {rounds},
        "batches recorded as learned, of every task": {task["batches"] for task in service["tasks"]} == {rounds},
        "position in every stream": {task: at.partition("/")[0] for task, at in stream["positions"].items()} == last,
        "steps of the learner": killed["learner"]["steps"] == rounds,
        "no dead letters": not any(task["dead_letters"] for task in service["tasks"]),
        "equal to the undisturbed service": not differences(learned(killed), learned(quiet)),
        "equal to a plain loop over Learner.step": not differences(learned(killed), learned(plain)),
    }
    for text, holds in checks.items():
        print(f"  {text:<45} {'yes' if holds else 'NO'}")
    return 0 if all(checks.values()) else 1


@needs_redis
def test_a_killed_service_learns_every_batch_exactly_once() -> None:
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=paths
    )  # without threads: forks
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 7


if __name__ == "__main__":
    sys.exit(main())
