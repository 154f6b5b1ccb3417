"""A service learns what its sources send, puts away what it cannot learn, and outlives whatever its hub does."""

import doctest
import json
import math
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from filelock import FileLock
from torch import Tensor, nn

from list_hub import ListHub, batch, damaged
from redis_process import RedisProcess, needs_redis
from serving import HUB, knows, list_of_tests, publish, running, saved, settings_of, task, until
from spcl.errors import DataError
from spcl.losses import LOSSES
from spcl.memory import MEMORIES, Reservoir
from spcl.models import BACKBONES
from spcl.serve import (
    CheckpointEvent,
    DeadLetterEvent,
    Event,
    ServeSettings,
    Service,
    StepEvent,
    TaskEvent,
)
from spcl.serve.api import Metrics
from spcl.serve.events import Totals
from spcl.serve.session import MEASURING_SHARE, Trainer
from spcl.serve.state import Records, TaskRecord, new_learner
from spcl.sources import HUBS, Entry, Hub, HubError, Publisher, RedisHub, announce, decode, encode_batch
from spcl.streams import Moment
from spcl.tasks import TaskDescription


@BACKBONES.register("picky-of-tests")
def picky_of_tests(inputs: Any) -> nn.Module:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x == 13).any():
                raise ValueError("13 is not for me")
            return self.layer(x)

    return Picky()


@pytest.fixture
def hub(tmp_path: Path) -> ListHub:
    return list_of_tests(str(tmp_path))


class CountingRedisHub(RedisHub):
    """Redis, and how many messages of every task were read; what is in its dead letters."""

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__(url, prefix)
        self.furthest: Counter[str] = Counter()

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int
    ) -> dict[str, Sequence[Entry]]:
        found = super().read(after, count, wait, max_bytes)
        self.furthest.update({task: len(entries) for task, entries in found.items()})
        return found

    @property
    def dead(self) -> dict[str, Any]:
        return {"a": self._client.xrange(self._key("dead", "a"))}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["list", pytest.param("redis", marks=needs_redis)])
def any_hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The hub in memory, and a real broker."""
    if request.param == "list":
        yield list_of_tests(str(tmp_path))
        return
    server = request.getfixturevalue("redis_server")
    with server.unused_at_the_end(), closing(CountingRedisHub(server.url, prefix=tmp_path.name)) as hub:
        HUB[str(tmp_path)] = hub
        yield hub


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ServeSettings]:
    return partial(settings_of, tmp_path)


# -- messages


def test_a_service_learns_tasks_and_reports(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publisher = publish(hub, "a", 10)
    publish(hub, "b", 4).end("b")
    publisher.start("speed", kind="regression")
    publisher.publish("speed", torch.zeros(5, 3), torch.zeros(5))
    with running(make(), predicts=True) as (service, events):
        until(lambda: service.status().samples == 33)
        until(lambda: task(service, "b").state == "finished" and service.snapshot.step == service.status().steps)
        until(lambda: hub.tasks() == ["a", "speed"] and hub.backlog("a", None) == 1)  # two checkpoints have the rest
        assert [(each.name, each.kind, each.classes, each.batches) for each in service.status().tasks] == [
            ("a", "classification", 2, 10),
            ("b", "classification", 2, 4),
            ("speed", "regression", 1, 1),
        ]
        until(lambda: task(service).backlog == 0)  # asked for twice a second
        assert (task(service).state, task(service).dead_letters) == ("running", 0)
    assert hub.closed == 1
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [event.step for event in steps] == list(range(len(steps)))
    assert sum(sum(event.samples.values()) for event in steps) == 33
    kinds = [(event.task, event.kind) for event in events if isinstance(event, TaskEvent)]
    assert sorted(kinds) == [("a", "started"), ("b", "ended"), ("b", "started"), ("speed", "started")]
    assert any(isinstance(event, CheckpointEvent) and event.bytes > 0 for event in events)


def documented_message() -> Callable[..., bytes]:
    """The function of the documentation that makes messages for publishers of other languages."""
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    section = page.partition("## Publish from other languages")[2].partition("\n## ")[0]
    names: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(section):
        exec(compile(example.source, "docs/serve.md", "exec"), names)
    return names["message"]  # type: ignore[no-any-return]


class RawFolder:
    """Publishes as the documentation says, without this package."""

    def __init__(self, folder: Path) -> None:
        self.source = {"name": "folder", "path": str(folder)}
        self._tasks = folder / "tasks"

    def publish(self, task: str, messages: list[bytes]) -> None:
        (self._tasks / task).mkdir(parents=True)
        for number, message in enumerate(messages):
            (self._tasks / task / ".new").write_bytes(message)
            (self._tasks / task / ".new").rename(self._tasks / task / f"{number:04}.safetensors")

    def has_ended(self, task: str) -> bool:
        return (self._tasks / task / ".ended").exists()


class RawRedis:
    """Publishes as the documentation says, by Redis' protocol alone."""

    def __init__(self, port: int, prefix: str) -> None:
        self.source = {"name": "redis", "url": f"redis://127.0.0.1:{port}/0", "prefix": prefix}
        self._port = port
        self._prefix = prefix

    def _send(self, *words: bytes | str) -> bytes:
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        with socket.create_connection(("127.0.0.1", self._port), timeout=20) as redis_socket:
            sized = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
            redis_socket.sendall(b"*%d\r\n%s" % (len(parts), sized))
            answer = redis_socket.recv(100)
        assert answer[:1] in b"$:", answer
        return answer

    def publish(self, task: str, messages: list[bytes]) -> None:
        self._send("SADD", f"{self._prefix}:tasks", task)
        for message in messages:
            self._send("XADD", f"{self._prefix}:stream:{task}", "*", "data", message)

    def has_ended(self, task: str) -> bool:
        return self._send("SISMEMBER", f"{self._prefix}:ended", task) == b":1\r\n"


@pytest.fixture(params=["folder", pytest.param("redis", marks=needs_redis)])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> RawFolder | RawRedis:
    if request.param == "folder":
        return RawFolder(tmp_path / "hub")
    return RawRedis(request.getfixturevalue("redis_server").port, tmp_path.name)


def test_the_documented_bytes_are_learned(raw: RawFolder | RawRedis, make: Callable[..., ServeSettings]) -> None:
    message, x = documented_message(), ("x", "F32", [2, 3], struct.pack("<6f", *range(6)))
    named = json.dumps({"kind": "classification", "classes": ["cat", "dog"]})
    labels, numbers = ("y", "U8", [2], bytes([1, 0])), ("y", "F64", [2], struct.pack("<2d", 0.5, -1.0))
    zeros = ("y", "F32", [2, 3], struct.pack("<6f", 0, 1, 0, 1, 1, 0))
    double = ("x", "F64", [2, 3], struct.pack("<6d", *range(6)))
    raw.publish(
        "pets", [message("start", task=named), message("batch", [x, labels]), message("batch", [double, labels])]
    )
    raw.publish(
        "speed", [message("start", task='{"kind": "regression"}'), message("batch", [x, numbers]), message("end")]
    )
    raw.publish("tags", [message("batch", [x, zeros], task='{"kind": "multilabel", "classes": 3}')])
    raw.publish("wrong", [message("start", task='{"kind": "other"}'), message("batch", [labels])])
    with running(make(source=raw.source, tasks={"start": "announced"})) as (service, events):
        until(lambda: [task(service, name).batches for name in ("pets", "speed", "tags")] == [2, 1, 1])
        until(lambda: task(service, "wrong").dead_letters == 2 and raw.has_ended("speed"))
        known = {each.name: (each.kind, each.classes, each.state) for each in service.status().tasks}
    assert known["pets"] == ("classification", 2, "running")
    assert known["speed"] == ("regression", 1, "finished")
    assert known["tags"] == ("multilabel", 3, "running")
    assert known["wrong"] == (None, None, "waiting")
    assert {event.task for event in events if isinstance(event, DeadLetterEvent)} == {"wrong"}


@pytest.mark.filterwarnings("ignore")
def test_a_thousand_damaged_messages_are_learned_or_put_away(any_hub: Any, make: Callable[..., ServeSettings]) -> None:
    known = TaskDescription.of("a", classes=2)
    Publisher(any_hub).start("a", classes=2)
    announcements = 0
    for data in damaged(1000, seed=0, ends=False):
        any_hub.append("a", data)
        with suppress(DataError):
            announcements += decode(data).content == "start" and decode(data).schema == known
    publish(any_hub, "b", 5)

    def handled(service: Service) -> int:
        return task(service).batches + task(service).skipped + task(service).dead_letters + announcements

    settings = make(max_bytes=1500)
    with running(settings) as (service, _):
        until(lambda: knows(service, "a") and handled(service) > 300)
    with running(settings) as (service, events):  # goes on after the same messages
        until(lambda: knows(service, "a") and handled(service) == 1000 and task(service, "b").batches == 5)
        assert task(service).batches > 10
        assert len(any_hub.dead["a"]) == task(service).dead_letters > 500
    assert all(event.reason for event in events if isinstance(event, DeadLetterEvent))


@pytest.mark.filterwarnings("ignore:task 'a'")
def test_a_source_of_nan_is_skipped_and_the_others_learn(any_hub: Any, make: Callable[..., ServeSettings]) -> None:
    publisher = publish(any_hub, "a", 0)
    for _ in range(6):
        publisher.publish("a", torch.full((2, 3), math.nan), torch.tensor([0, 1]))
    publish(any_hub, "b", 6)
    settings = make(together=True)
    with running(settings) as (service, events):
        until(lambda: service.status().steps == 6)
        assert (task(service, "a").batches, task(service, "a").samples, task(service, "a").skipped) == (0, 0, 6)
        assert (task(service, "b").batches, task(service, "b").samples, task(service, "b").skipped) == (6, 12, 0)
        assert service.status().samples == 12
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [(event.skipped, event.samples) for event in steps] == [(("a",), {"b": 2})] * 6
    assert all(tensor.isfinite().all() for tensor in saved(settings)["backbone"].values())


def test_a_batch_that_breaks_the_step_is_put_away_alone(
    hub: ListHub, make: Callable[..., ServeSettings], caplog: pytest.LogCaptureFixture
) -> None:
    publish(hub, "a", 5)
    publisher = publish(hub, "b", 2)
    publisher.publish("b", *batch(13))
    publisher.publish("b", *batch(13))
    publisher.publish("b", *batch(1))
    with running(make(together=True, learner={"backbone": "picky-of-tests"})) as (service, events):
        until(lambda: service.status().samples == 16)
        assert (task(service, "a").batches, task(service, "b").batches) == (5, 3)
    letters = [event for event in events if isinstance(event, DeadLetterEvent)]
    assert [(letter.task, letter.position) for letter in letters] == [("b", "4"), ("b", "5")]
    assert "13 is not for me" in letters[0].reason
    assert list(hub.dead["b"]) == ["4", "5"]
    (warning,) = [record for record in caplog.records if "was refused" in record.message]
    assert "task 'b'" in warning.message
    assert "13 is not for me" in warning.message


@BACKBONES.register("hungry-of-tests")
def hungry_of_tests(inputs: Any) -> nn.Module:
    class Hungry(nn.Module):
        feature_dim = 4

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x == 13).any():
                torch.empty(2**50)
            return self.layer(x)

    return Hungry()


class GreedyMemory(Reservoir):
    """Cannot finish any task."""

    def finish(self, task: str, describe: Any = None) -> None:
        raise ValueError("I keep it")


@LOSSES.register("greedy-of-tests")
def greedy_of_tests(task: Any) -> Any:
    """Loss of a classification that takes more memory than there is."""
    torch.empty(2**50)


def test_what_a_learner_cannot_hold_does_not_stop_the_service(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    """A message or a task that exhausts memory would else be the first thing that every new start reads."""
    publisher = publish(hub, "a", 2)
    publisher.publish("a", *batch(13))
    publisher.start("b", kind="regression")
    publisher.publish("b", torch.ones(2, 3), torch.ones(2))
    publish(hub, "a", 2, announce=False)
    learner = {"backbone": "hungry-of-tests", "regression_loss": "greedy-of-tests"}
    with running(make(learner=learner)) as (service, events):
        until(lambda: task(service, "a").batches == 4 and task(service, "b").dead_letters == 1)
    letters = {event.task: event.reason for event in events if isinstance(event, DeadLetterEvent)}
    assert letters.keys() == {"a", "b"}
    assert all("can't allocate memory" in reason for reason in letters.values())


def test_a_memory_that_cannot_finish_a_task_does_not_stop_the_service(
    hub: ListHub, make: Callable[..., ServeSettings]
) -> None:
    MEMORIES.register("greedy-of-tests")(GreedyMemory)
    publish(hub, "a", 2).end("a")
    publish(hub, "b", 2)
    with running(make(learner={"memory": "greedy-of-tests"})) as (service, events):
        until(lambda: task(service, "a").state == "finished" and task(service, "b").batches == 2)
    assert ["I keep it" in event.text for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]


def test_a_stalled_source_does_not_delay_and_a_flood_stays_in_the_hub(
    any_hub: Any, make: Callable[..., ServeSettings]
) -> None:
    publish(any_hub, "stalled", 1)
    publish(any_hub, "flood", 150)
    with running(make()) as (service, _):
        while not knows(service, "flood") or task(service, "flood").batches < 150:
            time.sleep(0.002)
            learned = task(service, "flood").batches if knows(service, "flood") else 0
            read = any_hub.furthest.get("flood", 0)
            again = task(service, "flood").batches if knows(service, "flood") else 0
            assert read <= again + 1 + 4 + 1 + 8 + (again - learned) + 8  # announcement, queue, moment, read-ahead
        assert task(service, "stalled").batches == 1
        until(lambda: task(service, "stalled").lag_seconds > 0.2)


class ConfusedHub(ListHub):
    """Returns entries of one task that are none."""

    def __init__(self, entry: Any) -> None:
        super().__init__()
        self.entries = [entry]

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        found = super().read(after, count, wait, max_bytes)
        return found | {"a": self.entries} if "a" in after and after["a"] == "1" and self.entries else found


@pytest.mark.parametrize("entry", [("2", None), (None, b""), 7, ("2", b"\xff" * 40)])
def test_an_entry_that_is_none_stops_no_other(entry: Any, tmp_path: Path, make: Callable[..., ServeSettings]) -> None:
    hub = HUB[str(tmp_path)] = ConfusedHub(entry)
    Publisher(hub).start("a", classes=2)
    publish(hub, "b", 3)
    with running(make()) as (service, _):
        until(lambda: knows(service, "b") and task(service, "b").batches == 3)
        until(lambda: task(service).dead_letters == 1 or task(service).state == "failed")
        hub.entries = []
        publish(hub, "a", 3, announce=False)
        publish(hub, "b", 1, announce=False)
        until(lambda: task(service, "b").batches == 4)
        until(lambda: task(service).batches + task(service).dead_letters == 3 and task(service).state == "running")


def test_what_cannot_be_put_away_is_reported_and_stops_nothing(make: Callable[..., ServeSettings]) -> None:
    folder = Path(str(make().state.parent)) / "hub"
    source = {"name": "folder", "path": str(folder)}
    hub = HUBS.make(source)
    publish(hub, "a", 2)
    publish(hub, "b", 2)
    (folder / "tasks/a" / f"{'x' * 243}.safetensors").write_bytes(b"junk")
    with running(make(source=source)) as (service, events):
        until(lambda: service.status().samples == 8 and task(service).dead_letters == 1)
        (kept,) = (folder / "dead-letters/a").glob("*.safetensors")
        assert kept.read_bytes() == b"junk"
        (folder / "dead-letters/b").write_text("where a folder should be")
        hub.append("b", b"junk")
        publish(hub, "b", 1)
        until(lambda: service.status().samples == 10 and task(service, "b").dead_letters == 1)
    letters = [event for event in events if isinstance(event, DeadLetterEvent)]
    assert ["it could not be kept" in letter.reason for letter in letters] == [False, True]


def test_only_the_first_message_of_a_task_that_cannot_be_kept_is_logged(
    make: Callable[..., ServeSettings], caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(str(make().state.parent)) / "hub"
    source = {"name": "folder", "path": str(folder)}
    hub = HUBS.make(source)
    publish(hub, "a", 1)
    (folder / "dead-letters").mkdir()
    (folder / "dead-letters/a").write_text("where a folder should be")
    for _ in range(20):
        hub.append("a", b"junk")
    with caplog.at_level("WARNING"), running(make(source=source)) as (service, _):
        until(lambda: knows(service, "a") and task(service).dead_letters == 20)
    (record,) = [each for each in caplog.records if "task 'a'" in each.getMessage()]
    assert record.levelname == "ERROR"
    assert "it could not be kept" in record.getMessage()


# -- tasks


def test_a_task_says_what_it_waits_for(any_hub: Any, make: Callable[..., ServeSettings]) -> None:
    publish(any_hub, "a", 1, announce=False)
    with running(make()) as (service, _):
        until(lambda: task(service).state == "waiting")
        assert task(service).waits_for == "its kind and classes: a start message in its stream, or POST /tasks"
        service.start_task("a", classes=2)
        until(lambda: task(service).batches == 1)
        assert task(service).waits_for is None
        assert service.finish_task("a").waits_for == "its end between two steps, as requested"
        until(lambda: task(service).state == "finished")
        assert task(service).waits_for is None


@needs_redis
def test_names_that_are_refused_are_in_log_status_and_events(
    redis_server: RedisProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = {"name": "redis", "url": redis_server.url, "prefix": tmp_path.name}
    with redis.Redis.from_url(redis_server.url) as client:
        client.sadd(f"{tmp_path.name}:tasks", "../camera", *(f"no\x1b[2J name {number}" for number in range(50)))
    with running(settings_of(tmp_path, source=source)) as (service, events):
        until(lambda: service.status().refused_names)
        until(lambda: len(service.status().refused_names) == 20)
        shown = service.status().refused_names
    assert shown[0].startswith("a task cannot be named '../camera'; take up to 100 letters")
    told = [event.text for event in events if isinstance(event, TaskEvent)]
    logged = [record.getMessage() for record in caplog.records if "cannot be named" in record.getMessage()]
    assert told == [*shown]
    assert [text in message for text, message in zip(shown, logged, strict=True)] == 20 * [True]


def test_tasks_start_on_first_sight(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publish(hub, "a", 2, announce=False)
    Publisher(hub).publish("number", torch.zeros(2, 3), torch.zeros(2, 4))
    hub.append("memory", b"a reserved name")
    with running(make(tasks={"start": "first-sight", "classes": 2})) as (service, events):
        until(lambda: knows(service, "a") and task(service).batches == 2)
        until(lambda: task(service, "number").dead_letters == 1)
        assert not knows(service, "memory")
    assert [event.task for event in events if isinstance(event, TaskEvent) and event.kind == "failed"] == ["memory"]
    with running(make(tasks={"start": "first-sight"}, state=f"{make().state}2")) as (service, _):
        until(lambda: knows(service, "number") and task(service, "number").batches == 1)
        assert (task(service, "number").kind, task(service, "number").classes) == ("regression", 4)
        until(lambda: task(service, "a").dead_letters >= 1)  # the first service let the hub forget


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a service look for silence ten times a second."""
    monkeypatch.setattr("spcl.serve.session.TICK_SECONDS", 0.1)


def test_silence_ends_a_task_but_an_outage_is_no_silence(
    hub: ListHub, make: Callable[..., ServeSettings], ticks: None
) -> None:
    publish(hub, "a", 3)
    with running(make(tasks={"end": "silence", "silence_seconds": 0.4})) as (service, events):
        until(lambda: knows(service, "a") and task(service).batches == 3)
        hub.is_down = True
        until(lambda: any(isinstance(event, TaskEvent) and event.kind == "failed" for event in events))
        time.sleep(0.8)
        assert task(service).state == "failed"
        hub.is_down = False
        until(lambda: task(service).state == "finished")
    kinds = [event.kind for event in events if isinstance(event, TaskEvent)]
    assert kinds == ["started", "failed", "recovered", "ended"]


class SlowlyFailingHub(ListHub):
    """Takes its time to find out that it is down."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        if self.is_down:
            time.sleep(0.05)
            raise self.error("it is down")
        return super().read(after, count, wait)


@pytest.mark.parametrize("error", [HubError, PermissionError])
def test_an_outage_that_is_found_out_slowly_is_no_silence(
    error: type[Exception], tmp_path: Path, make: Callable[..., ServeSettings], ticks: None
) -> None:
    hub = HUB[str(tmp_path)] = SlowlyFailingHub(error)
    names = [f"task-{number:02}" for number in range(8)]
    for name in names:
        publish(hub, name, 1)
    with running(make(tasks={"end": "silence", "silence_seconds": 0.5})) as (service, events):
        until(lambda: all(knows(service, name) and task(service, name).batches == 1 for name in names))
        hub.is_down = True
        time.sleep(1.1)
        assert all(task(service, name).state != "finished" for name in names)
        hub.is_down = False
        until(lambda: all(task(service, name).state == "finished" for name in names))
    assert sum(isinstance(event, TaskEvent) and event.kind == "recovered" for event in events) == 8


def test_messages_after_the_end_of_a_task_are_counted(any_hub: Any, make: Callable[..., ServeSettings]) -> None:
    publish(any_hub, "a", 3).end("a")
    publish(any_hub, "a", 12, announce=False)  # more than are read along with the end
    publish(any_hub, "b", 4).end("b")
    settings = make()
    with running(settings) as (service, events):
        until(lambda: any_hub.tasks() == [])
        until(lambda: task(service, "a").late == 12)
        metrics = Metrics(Totals, service.status).text().decode()
    assert 'spcl_late_messages{source="a",task="a"} 12.0' in metrics
    assert 'spcl_late_messages{source="b",task="b"} 0.0' in metrics
    late = [event for event in events if isinstance(event, TaskEvent) and event.kind == "late"]
    assert [(event.task, event.text.split(";")[0]) for event in late] == [
        ("a", "12 of its messages were not learned, as it had ended")
    ]
    assert [each["late"] for each in saved(settings)["sources"]["service"]["tasks"]] == [12, 0]
    with running(settings) as (service, events):
        until(lambda: any(isinstance(event, CheckpointEvent) for event in events))
        assert (task(service, "a").batches, task(service, "a").late) == (3, 12)


def test_messages_that_a_request_to_finish_leaves_are_counted(hub: ListHub, make: Callable[..., ServeSettings]) -> None:
    publish(hub, "a", 3)
    with running(make(checkpoint_seconds=0.3)) as (service, _):
        until(lambda: knows(service, "a") and task(service).batches == 3)
        service.finish_task("a")
        publish(hub, "a", 2, announce=False)
        until(lambda: hub.tasks() == [])
        until(lambda: task(service).batches + task(service).late == 5)


class UntrimmableHub(ListHub):
    """Is away whenever something is to be deleted."""

    def trim(self, task: str, upto: str) -> None:
        raise HubError("it is down")

    def end(self, task: str) -> None:
        raise HubError("it is down")


def test_what_a_service_could_not_delete_the_next_one_does(tmp_path: Path, make: Callable[..., ServeSettings]) -> None:
    """It has nothing to learn: a source that waits for space in a full stream would wait without end."""
    away = HUB[str(tmp_path)] = UntrimmableHub()
    publish(away, "a", 6)
    publish(away, "b", 3).end("b")
    with running(make()) as (service, _):
        until(lambda: knows(service, "a") and knows(service, "b"))
        until(lambda: task(service).batches == 6 and task(service, "b").state == "finished")
    back = HUB[str(tmp_path)] = ListHub()
    back.streams = away.streams
    with running(make()):
        until(lambda: back.backlog("a", None) == 1 and back.ended == {"b"})


# -- a hub that is set back, or held up


@pytest.fixture(params=["folder", pytest.param("redis", marks=needs_redis)])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Settings of a hub that survives the process."""
    if request.param == "folder":
        yield {"name": "folder", "path": str(tmp_path / "hub")}
        return
    with RedisProcess(tmp_path) as server, server.unused_at_the_end():
        yield {"name": "redis", "url": server.url}


@pytest.fixture
def open_hub(source: dict[str, str]) -> Iterator[Callable[[], Hub]]:
    """Opens that hub, as other processes would."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(HUBS.make(source)))


def all_trimmed(hub: Hub) -> bool:
    return all(hub.backlog(name, None) == 1 for name in ("a", "b"))


def delete_all(source: dict[str, str]) -> None:
    if source["name"] == "folder":
        for task in ("a", "b"):
            shutil.rmtree(Path(source["path"]) / "tasks" / task)
    else:
        with redis.Redis.from_url(source["url"]) as client:
            client.flushall()


def store(source: dict[str, str], number: int, content: float = 0.0) -> None:
    """Store a batch of task a as a publisher of another kind does."""
    data = encode_batch(batch(content), announce("a", classes=2))
    if source["name"] == "folder":
        path = Path(source["path"]) / "tasks/a" / f"{number:020}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    else:
        with redis.Redis.from_url(source["url"]) as client:
            client.sadd("spcl:tasks", "a")
            client.xadd("spcl:stream:a", {"data": data}, id=f"{number}-0")


def test_streams_that_were_deleted_and_begin_anew_are_learned(
    source: dict[str, str], open_hub: Callable[[], Hub], make: Callable[..., ServeSettings]
) -> None:
    hub = open_hub()
    for name in ("a", "b"):
        publish(hub, name, 6)
    with running(make(source=source)) as (service, events):
        until(lambda: service.status().samples == 24 and all_trimmed(hub))
        delete_all(source)
        time.sleep(0.6)  # an empty hub is no reset
        again = open_hub()
        publish(again, "a", 4)
        publish(again, "b", 4)
        until(lambda: service.status().samples == 40)
    assert not [event for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]


def test_a_stream_that_was_set_back_is_reported_and_left_alone(
    source: dict[str, str], open_hub: Callable[[], Hub], make: Callable[..., ServeSettings]
) -> None:
    hub = open_hub()
    for number in range(1, 11):
        store(source, number)
    publish(hub, "b", 1)
    with running(make(source=source)) as (service, events):
        until(
            lambda: (
                knows(service, "a")
                and task(service).batches == 10
                and {hub.backlog(name, None) for name in hub.tasks()} == {1}
            )
        )
        delete_all(source)
        for number in range(1, 7):
            store(source, number, content=1.0)
        until(lambda: task(service).state == "failed" and task(service).backlog == 6)
        for number in range(7, 14):  # beyond the position: would be read on in the middle
            store(source, number, content=1.0)
        publish(open_hub(), "b", 1)
        until(lambda: task(service, "b").batches == 2 and task(service).backlog == 13)
        assert (task(service).batches, hub.backlog("a", None)) == (10, 13)
        service.finish_task("a")
        until(lambda: task(service).state == "finished" and hub.tasks() == ["b"])
    (failed,) = [event for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]
    assert failed.task == "a"
    assert "so it was reset" in failed.text


def test_a_publisher_that_hangs_inside_its_lock_does_not_stop_training(
    tmp_path: Path, make: Callable[..., ServeSettings]
) -> None:
    source = {"name": "folder", "path": str(tmp_path / "hub")}
    hub = HUBS.make(source)
    publish(hub, "a", 2)
    publish(hub, "b", 2)
    with running(make(source=source)) as (service, _):
        until(lambda: service.status().samples == 8)
        Publisher(hub).end("a")
        with FileLock(tmp_path / "hub/tasks/a/.lock"):
            until(lambda: task(service, "a").state == "finished")
            until(lambda: (service.status().checkpoint_age or 9.0) < 0.5)
            publish(hub, "b", 20, announce=False)
            until(lambda: task(service, "b").batches == 22)


WORKS = threading.Event()


@BACKBONES.register("stuck-of-tests")
def stuck_of_tests(inputs: Any) -> nn.Module:
    class Stuck(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert WORKS.wait(60.0)
            return super().forward(x)

    return Stuck(3, 4)


def test_training_that_does_not_move_is_no_readiness(tmp_path: Path, make: Callable[..., ServeSettings]) -> None:
    hub = list_of_tests(str(tmp_path))
    publish(hub, "a", 1)
    WORKS.clear()
    with running(make(ready_seconds=0.2, learner={"backbone": "stuck-of-tests"})) as (service, _):
        until(lambda: any("training has not moved" in fault for fault in service.faults()))
        WORKS.set()
        until(lambda: not service.faults() and task(service).batches == 1)


# -- what is measured


TICK = 0.001


class Clock:
    """Goes on by a tick whenever it is read, and by what is added."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now


class Training:
    """A trainer of two tasks by that clock."""

    def __init__(self, folder: Path) -> None:
        settings = settings_of(folder)
        records = Records({name: TaskRecord(name, TaskDescription.of(name, classes=2)) for name in ("a", "b")})
        learner = new_learner(settings.run_settings(), settings.inputs, records)
        events: list[Event] = []
        self.clock, self._events = Clock(), events
        self._trainer = Trainer(learner, settings.run_settings(), records, events.append, pytest.fail, self.clock)
        self._step = 0

    def measured(self, moments: int, pause: float) -> list[StepEvent]:
        """Train `moments` moments with pauses between them; return the steps with κ."""
        begin = len(self._events)
        for _ in range(moments):
            self.clock.now += pause
            batches = {"a": batch(1 + self._step % 7), "b": batch(2 + self._step % 5)}
            self._trainer.train([Moment(self._step, batches, (), ())])
            self._step += 1
        steps = [event for event in self._events[begin:] if isinstance(event, StepEvent)]
        assert len(steps) == moments
        return [event for event in steps if event.kappa_before is not None]


def test_where_batches_come_rarely_all_are_measured(tmp_path: Path) -> None:
    steps = Training(tmp_path).measured(20, pause=10.0)
    assert len(steps) == 20
    assert all(event.accuracies.keys() == {"a", "b"} for event in steps[1:])  # no task is known before its first batch


def test_where_they_come_without_a_pause_measuring_takes_its_share(tmp_path: Path) -> None:
    training = Training(tmp_path)
    cost = 2 * TICK  # a test, and κ
    for idle in (0.0, 1e5):  # time without batches is not saved up
        training.clock.now += idle
        begin = training.clock.now
        steps = training.measured(200, pause=0.0)
        share = MEASURING_SHARE * (training.clock.now - begin)
        assert share / 2 < cost * len(steps) < share + 2 * cost


def test_a_service_reports_what_it_measures(tmp_path: Path) -> None:
    hub: ListHub = list_of_tests(str(tmp_path))
    events: list[Event]
    with running(settings_of(tmp_path)) as (_, events):

        def is_measured() -> bool:
            for name in ("a", "b"):
                publish(hub, name, 1, start=1)  # a batch of zeros would have gradients of zeros, whose κ is NaN
            steps = [event for event in list(events) if isinstance(event, StepEvent)]
            return any(event.accuracies for event in steps) and any((event.kappa_before or 0) >= 1 for event in steps)

        until(is_measured)
    accuracies = [event.accuracies for event in events if isinstance(event, StepEvent)]
    assert all(0 <= accuracy <= 1 for each in accuracies for accuracy in each.values())
