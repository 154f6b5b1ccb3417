"""A service outlives what its hub, its publishers and its disk do wrong."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import redis

from list_hub import ListHub, batch
from redis_process import RedisProcess, needs_redis
from serving import HUB, knows, publish, running, settings_of, task, until
from spcl.serve import ServeSettings, TaskEvent
from spcl.serve.watch import Watch
from spcl.sources import HUBS, Data, Hub, HubError, Schema, encode_batch


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ServeSettings]:
    return partial(settings_of, tmp_path)


class SlowlyFailingHub(ListHub):
    """Takes its time to find out that it is down."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def read(self, after: Mapping[str, str | None], count: int, wait: float) -> dict[str, list[tuple[str, Data]]]:
        if self.is_down:
            time.sleep(0.1)
            raise self.error("it is down")
        return super().read(after, count, wait)


@pytest.mark.parametrize("error", [HubError, PermissionError])
def test_an_outage_that_is_found_out_slowly_is_no_silence(
    error: type[Exception], tmp_path: Path, make: Callable[..., ServeSettings]
) -> None:
    hub = HUB[str(tmp_path)] = SlowlyFailingHub(error)
    names = [f"task-{number:02}" for number in range(16)]
    for name in names:
        publish(hub, name, 1)
    with running(make(tasks={"end": "silence", "silence_seconds": 0.7})) as (service, events):
        until(lambda: all(knows(service, name) and task(service, name).batches == 1 for name in names))
        hub.is_down = True
        time.sleep(1.8)
        assert all(task(service, name).state != "finished" for name in names)
        hub.is_down = False
        until(lambda: all(task(service, name).state == "finished" for name in names))
    assert sum(isinstance(event, TaskEvent) and event.kind == "recovered" for event in events) == 16


@pytest.fixture(params=["folder", pytest.param("redis", marks=needs_redis)])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Settings of a hub that survives the process."""
    if request.param == "folder":
        yield {"name": "folder", "path": str(tmp_path / "hub")}
        return
    server = RedisProcess(tmp_path)
    yield {"name": "redis", "url": server.url}
    server.kill()


def all_trimmed(hub: Hub) -> bool:
    return all(hub.backlog(name, None) == 1 for name in ("a", "b"))


def delete_all(source: dict[str, str]) -> None:
    if source["name"] == "folder":
        for task in ("a", "b"):
            shutil.rmtree(Path(source["path"]) / "tasks" / task)
    else:
        redis.Redis.from_url(source["url"]).flushall()


def store(source: dict[str, str], number: int) -> None:
    """Store a batch of task a as a publisher of another kind does."""
    data = encode_batch(batch(1), Schema.of(classes=2))
    if source["name"] == "folder":
        path = Path(source["path"]) / "tasks/a" / f"{number:020}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    else:
        client = redis.Redis.from_url(source["url"])
        client.sadd("spcl:tasks", "a")
        client.xadd("spcl:stream:a", {"data": data}, id=f"{number}-0")


def test_streams_that_were_deleted_and_begin_anew_are_learned(
    source: dict[str, str], make: Callable[..., ServeSettings]
) -> None:
    hub = HUBS.make(source)
    for name in ("a", "b"):
        publish(hub, name, 6)
    with running(make(source=source)) as (service, events):
        until(lambda: service.status().samples == 24 and all_trimmed(hub))
        delete_all(source)
        time.sleep(0.6)  # an empty hub is no reset
        again = HUBS.make(source)
        publish(again, "a", 4)
        publish(again, "b", 4)
        until(lambda: service.status().samples == 40)
    assert not [event for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]


def test_a_stream_that_was_set_back_is_reported_and_left_alone(
    source: dict[str, str], make: Callable[..., ServeSettings]
) -> None:
    hub = HUBS.make(source)
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
            store(source, number)
        until(lambda: task(service).state == "failed" and task(service).backlog == 6)
        for number in range(7, 14):  # beyond the position: would be read on in the middle
            store(source, number)
        publish(HUBS.make(source), "b", 1)
        until(lambda: task(service, "b").batches == 2 and task(service).backlog == 3)
        assert (task(service).batches, hub.backlog("a", None)) == (10, 13)
        service.finish_task("a")
        until(lambda: task(service).state == "finished" and hub.tasks() == ["b"])
    (failed,) = [event for event in events if isinstance(event, TaskEvent) and event.kind == "failed"]
    assert failed.task == "a"
    assert "so it was reset" in failed.text


class SlowlyListingHub(ListHub):
    """Takes its time to find out that its tasks cannot be listed."""

    def tasks(self) -> list[str]:
        if self.is_down:
            time.sleep(0.1)
            raise HubError("it is down")
        return super().tasks()


def test_new_tasks_are_found_soon_after_a_slow_outage() -> None:
    hub = SlowlyListingHub()
    hub.is_down = True
    watch = Watch(hub, dict, lambda *_: None)
    watch.start()
    time.sleep(0.7)
    hub.is_down = False
    hub.append("a", b"")
    begin = time.monotonic()
    until(lambda: watch.tasks == ["a"])
    assert time.monotonic() - begin < 5.0
    watch.close()
