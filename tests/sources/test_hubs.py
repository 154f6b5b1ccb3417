"""Beyond `spcl.testing.check_hub`: positions survive a crash, and streams that lost their end are reported."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis

from list_hub import batch, source_of, values
from redis_process import RedisProcess, needs_redis
from spcl.errors import TaskError
from spcl.sources import (
    FolderHub,
    Hub,
    Message,
    Publisher,
    RedisHub,
    ResetError,
)
from spcl.streams import LiveStream
from spcl.tasks import TaskDescription

TWO = TaskDescription.of("a", classes=2)


def repr_of(value: object) -> str:
    return ascii(value)[:20]


def test_messages_come_in_order_and_again_from_any_position(reopen: Callable[[], Hub]) -> None:
    publisher = Publisher(reopen())
    publisher.start("a", classes=2)
    for number in range(12):
        publisher.publish("a", *batch(number))
    publisher = Publisher(reopen())  # a publisher that starts again goes on
    for number in range(12, 20):
        publisher.publish("a", *batch(number))
    publisher.end("a")
    hub = reopen()
    assert isinstance(hub, Hub)
    assert hub.tasks() == ["a"]
    assert hub.backlog("a", None) == 22
    messages = list(source_of(hub).read(None))
    assert values(messages) == list(range(20))
    middle = messages[7].position
    assert values(source_of(hub).read(None)) == list(range(20))  # back again, with the same hub
    assert values(source_of(reopen(), description=TWO).read(middle)) == list(range(8, 20))
    assert hub.backlog("a", middle) == 22 - 9
    source_of(hub).commit(middle)
    assert hub.backlog("a", None) <= 14
    assert values(source_of(reopen(), description=TWO).read(middle)) == list(range(8, 20))


def test_numbers_go_on_after_everything_was_committed(reopen: Callable[[], Hub]) -> None:
    Publisher(reopen()).publish("a", *batch(0))
    source = source_of(reopen(), first_sight=TWO)
    first = next(source.read(None))
    source.commit(first.position)
    Publisher(reopen()).publish("a", *batch(1))
    assert values([next(source.read(first.position))]) == [1]


@needs_redis
def test_dead_letters_are_kept_once(tmp_path: Path, redis_server: RedisProcess) -> None:
    folder = FolderHub(tmp_path)
    with redis_server.hubs("dead") as reopen:
        redis = reopen()
        for _ in range(2):
            folder.dead_letter("a", "01", b"junk", "why")
            redis.dead_letter("a", "1-0", b"junk", "why")
        redis.dead_letter("a", "4-0", b"junk", "why")
        stored = redis._client.xrange("dead:dead:a")
    assert sorted(path.name for path in tmp_path.glob("dead-letters/a/*")) == ["01.safetensors", "01.txt"]
    assert (tmp_path / "dead-letters/a/01.txt").read_text() == "why\n"
    assert stored == [(number, {b"data": b"junk", b"reason": b"why"}) for number in (b"1-0", b"4-0")]


@pytest.mark.parametrize("name", ["", "memory", "../x", ".x", "a/b", "x" * 101, "猫" * 67, "😀a", 5], ids=repr_of)
def test_impossible_names_are_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="a task cannot be named"):
        Publisher(FolderHub(tmp_path)).publish(name, *batch(0))


@pytest.mark.parametrize("name", ["猫" * 66 + "ab", "x" * 100], ids=repr_of)
def test_the_longest_names_are_names_of_files(name: str, tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    Publisher(hub).publish(name, *batch(0))
    hub.dead_letter(name, "1", b"junk", "why")
    assert hub.tasks() == [name]


# -- streams that lost their end


class Place:
    """A hub whose content can be copied and put back."""

    def __init__(self, open_hub: Callable[[], Hub], save: Callable[[], None], restore: Callable[[], None]) -> None:
        self.open, self.save, self.restore = open_hub, save, restore


@pytest.fixture(params=["folder", pytest.param("redis", marks=needs_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "folder":
        path, copy = tmp_path / "hub", tmp_path / "copy"

        def restore() -> None:
            shutil.rmtree(path)
            shutil.copytree(copy, path)

        yield Place(lambda: FolderHub(path), lambda: shutil.copytree(path, copy) and None, restore)
        return
    with RedisProcess(tmp_path) as server, ExitStack() as stack:
        client = stack.enter_context(redis.Redis.from_url(server.url))
        saved: dict[bytes, bytes] = {}

        def put_back() -> None:
            client.flushall()
            for key, content in saved.items():
                client.restore(key, 0, content)

        yield Place(
            lambda: stack.enter_context(closing(RedisHub(server.url))),
            lambda: saved.update({key: client.dump(key) for key in client.keys("*")}),
            put_back,
        )


def delivered(stream: LiveStream) -> list[float]:
    """The values of up to 20 batches."""
    return [float(moment.batches["a"][0][0, 0]) for moment in islice(stream, 20) if moment.batches]


def publish(hub: Hub, count: int, start: int = 0) -> None:
    publisher = Publisher(hub)
    for number in range(start, start + count):
        publisher.publish("a", *batch(number))


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("new", [8, 20])
def test_a_stream_that_grew_past_the_position_after_a_loss_is_reported(
    new: int, is_running: bool, place: Place
) -> None:
    publish(place.open(), 12)
    place.save()
    publish(place.open(), 8, start=12)
    outages: list[Exception | None] = []
    source = source_of(place.open(), description=TWO, on_outage=lambda _, error: outages.append(error))
    with LiveStream({"a": source}, patience=0.2) as stream:
        assert delivered(stream) == list(range(20))
        state = stream.state_dict()
        if is_running:
            place.restore()
            publish(place.open(), new, start=100)
            assert delivered(stream) == []
            hub = source.hub
    if not is_running:
        place.restore()
        publish(place.open(), new, start=100)
        source = source_of(place.open(), description=TWO, on_outage=lambda _, error: outages.append(error))
        with LiveStream({"a": source}, patience=0.2) as again:
            again.load_state_dict(state)
            assert delivered(again) == []
            hub = source.hub
    position = state["positions"]["a"]
    for call in (lambda: hub.backlog("a", position), lambda: hub.trim("a", position)):
        with pytest.raises(ResetError, match=r"does not have the message at .* that was learned"):
            call()
    assert hub.backlog("a", None) == 12 + new
    if new > 8:  # otherwise nothing new is read; the backlog says so
        assert type(outages[-1]) is ResetError  # before, the folder may have been found missing
        assert source.is_out


def test_a_stream_that_lost_its_last_message_is_reported_whatever_its_next_numbers_are(place: Place) -> None:
    hub = place.open()
    publish(hub, 6)
    place.save()
    publish(hub, 1, start=6)
    *_, last = [message.position for message in islice(source_of(hub, description=TWO).read(None), 7)]
    place.restore()
    publish(hub, 2, start=7)
    with pytest.raises(ResetError):
        hub.read({"a": last}, 8, 0.0, 10**6)


def test_messages_that_were_trimmed_are_no_reset(place: Place) -> None:
    hub = place.open()
    publish(hub, 3)
    read = list(islice(source_of(hub, description=TWO).read(None), 3))
    trimming = Publisher(place.open(), capacity=4, when_full="trim")
    for number in range(10, 16):
        trimming.publish("a", *batch(number))
    assert hub.backlog("a", read[-1].position) >= 4
    later = islice(source_of(hub, description=TWO).read(read[-1].position), 4)
    assert [float(each.batch[0][0, 0]) for each in later if isinstance(each, Message)] == [12, 13, 14, 15]


def test_positions_of_earlier_versions_are_read_on_from(place: Place) -> None:
    hub = place.open()
    publish(hub, 6)
    position = [message.position for message in islice(source_of(hub, description=TWO).read(None), 3)][-1]
    old, check = position.split("/")
    assert len(check) == 16
    for each in (old, position):
        assert hub.backlog("a", each) == 3
        read = islice(source_of(hub, description=TWO).read(each), 3)
        assert [float(each.batch[0][0, 0]) for each in read if isinstance(each, Message)] == [3, 4, 5]
    hub.trim("a", old)
    hub.dead_letter("a", position, b"junk", "why")
    assert hub.backlog("a", None) == 4
