"""A service outlives what its hub, its publishers and its disk do wrong."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis
from torch import nn

from list_hub import ListHub, batch, outcomes, source_of
from redis_process import RedisProcess, needs_redis
from serving import HUB, knows, publish, running, settings_of, task, until
from spcl.learner import Learner
from spcl.methods import SORO
from spcl.serve import DeadLetterEvent, ServeSettings, TaskEvent
from spcl.serve.watch import Watch
from spcl.sources import HUBS, Entry, FolderHub, Hub, HubError, Publisher, Schema, encode_batch
from spcl.streams import LiveStream


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ServeSettings]:
    return partial(settings_of, tmp_path)


class SlowlyFailingHub(ListHub):
    """Takes its time to find out that it is down."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
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


def store(source: dict[str, str], number: int) -> None:
    """Store a batch of task a as a publisher of another kind does."""
    data = encode_batch(batch(1), Schema.of(classes=2))
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
            store(source, number)
        until(lambda: task(service).state == "failed" and task(service).backlog == 6)
        for number in range(7, 14):  # beyond the position: would be read on in the middle
            store(source, number)
        publish(open_hub(), "b", 1)
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


def test_files_that_are_too_large_or_none_are_put_away_unread(tmp_path: Path) -> None:
    hub, folder = FolderHub(tmp_path), tmp_path / "tasks/a"
    publish(hub, "a", 1)
    (folder / "1.safetensors").mkdir()
    os.mkfifo(folder / "2.safetensors")
    with (folder / "3.safetensors").open("wb") as file:
        file.truncate(2**40)
    (folder / "4.safetensors").write_bytes(encode_batch(batch(4)))
    first, *reasons, last = outcomes(islice(source_of(hub, max_bytes=100_000).read(None), 5))
    assert first == last == "learned"
    assert "Is a directory" in reasons[0]
    assert "cannot be read" in reasons[1]
    assert "has 1099511627776 bytes, and at most 100000" in reasons[2]
    hub.dead_letter("a", "3", b"", reasons[2])
    assert (tmp_path / "dead-letters/a/3.safetensors").stat().st_size == 2**40
    hub.trim("a", "4")
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["1.safetensors", "4.safetensors"]


def test_only_the_newest_dead_letters_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spcl.sources.dead_letters.MOST", 20)
    monkeypatch.setattr("spcl.sources.dead_letters.COUNTED_EVERY", 0)
    hub = FolderHub(tmp_path)
    for number in range(50):
        hub.dead_letter("a", f"{number:02}", b"junk", "why")
    names = sorted(path.name for path in (tmp_path / "dead-letters/a").iterdir())
    assert names == sorted(f"{number}.{kind}" for number in range(30, 50) for kind in ("safetensors", "txt"))


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


def test_fitting_survives_a_hub_that_is_away_at_a_checkpoint(tmp_path: Path) -> None:
    hub = UntrimmableHub()
    publish(hub, "a", 6).end("a")
    learner = Learner(nn.Linear(3, 4), SORO())
    learner.add_task("a", classes=2)
    with LiveStream({"a": source_of(hub)}, patience=10.0) as stream:
        learner.fit(stream, checkpoint=tmp_path / "learner", every=0.0)
    assert learner.steps == 6
