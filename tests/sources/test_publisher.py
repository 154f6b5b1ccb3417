"""A batch that is published again after its answer was lost is stored once; publishers wait or trim."""

import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from list_hub import batch, source_of, values
from redis_process import RedisProcess, needs_redis
from spcl.errors import SpclError
from spcl.sources import (
    Data,
    FolderHub,
    Hub,
    HubError,
    Publisher,
    decode,
    encode_batch,
)
from spcl.sources.wire import stamped
from spcl.tasks import TaskDescription


def test_blocking_publishers_wait_for_the_learner(reopen_lasting: Callable[[], Hub]) -> None:
    publisher = Publisher(reopen_lasting(), capacity=5, patience=0.1)
    for number in range(5):
        publisher.publish("a", *batch(number))
    with pytest.raises(HubError, match="has been full with 5 messages"):
        publisher.publish("a", *batch(5))
    source = source_of(reopen_lasting(), first_sight=TaskDescription.of("a", classes=2))
    messages = list(islice(source.read(None), 5))
    source.commit(messages[-1].position)
    publisher.publish("a", *batch(5))
    assert values([next(source.read(messages[-1].position))]) == [5]


def test_trimming_publishers_keep_the_newest_and_the_task_stays_known(reopen_lasting: Callable[[], Hub]) -> None:
    publisher = Publisher(reopen_lasting(), capacity=4, when_full="trim")
    publisher.start("a", classes=2)
    for number in range(10):
        publisher.publish("a", *batch(number))
    source = source_of(reopen_lasting())
    assert values(islice(source.read(None), 4)) == [6, 7, 8, 9]
    assert source.description == TaskDescription.of("a", classes=2)


@pytest.mark.parametrize("options", [{"capacity": 1}, {"when_full": "wait"}])
def test_impossible_publishers_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpclError, match="capacity is"):
        Publisher(FolderHub(tmp_path), **options)


# -- repeated batches


class Deaf:
    """A hub whose answers are lost now and then: the message is stored, or not, and an error is raised."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.loses: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hub, name)

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        lost = self.loses.pop(0) if self.loses else ""
        position = "" if lost == "message" else self._hub.append(task, data, keep)
        if lost:
            raise HubError(f"the {lost} was lost")
        return position


def stored(hub: Hub) -> list[float]:
    letters = [
        decode(data) for _, data in hub.read({"a": None}, 100, 0.0, 10**6).get("a", ()) if isinstance(data, Data)
    ]
    return [float(letter.batch[0][0, 0]) for letter in letters if letter.batch is not None]


def test_a_batch_that_is_published_again_is_stored_once(reopen_lasting: Callable[[], Hub]) -> None:
    deaf: Any = Deaf(reopen_lasting())
    publisher = Publisher(deaf)
    for number, lost in enumerate((["answer"], ["message"], ["answer", "message", "answer"], [])):
        deaf.loses = list(lost)
        for _ in lost:
            with pytest.raises(HubError, match="was lost"):
                publisher.publish("a", *batch(number))
        publisher.publish("a", *batch(number))
    assert reopen_lasting().backlog("a", None) == 4
    assert stored(reopen_lasting()) == [0, 1, 2, 3]


def test_another_batch_after_a_lost_answer_is_stored(reopen_lasting: Callable[[], Hub]) -> None:
    deaf: Any = Deaf(reopen_lasting())
    publisher = Publisher(deaf)
    for number in range(3):
        deaf.loses = ["answer"]
        with pytest.raises(HubError):
            publisher.publish("a", *batch(number))
    publisher.publish("a", *batch(3))
    for _ in range(2):  # equal batches are not the same batch
        publisher.publish("a", *batch(4))
    assert stored(reopen_lasting()) == [0, 1, 2, 3, 4, 4]


def test_a_named_publisher_that_starts_again_repeats_nothing(reopen_lasting: Callable[[], Hub]) -> None:
    for killed_at, again_from in ((4, 0), (7, 2), (9, 6)):
        publisher = Publisher(reopen_lasting(), name="camera-1")
        publisher.start("a", classes=2)
        for number in range(again_from, killed_at):
            publisher.publish("a", *batch(number), number=number)
    Publisher(reopen_lasting(), name="camera-2").publish("a", *batch(100), number=0)
    Publisher(reopen_lasting(), name="camera-1").publish("b", *batch(100), number=0)
    assert stored(reopen_lasting()) == [*range(9), 100]
    assert [reopen_lasting().backlog(task, None) for task in "ab"] == [3 + 10, 1]


def test_appending_again_returns_the_position_of_the_first_time(reopen_lasting: Callable[[], Hub]) -> None:
    data = [stamped(encode_batch(batch(number)), "x", number) for number in (1, 2)]
    positions = [reopen_lasting().append("a", each) for each in data]
    assert reopen_lasting().append("a", data[1]) == positions[1]
    assert reopen_lasting().append("a", data[0]) == positions[1]  # only the last one of a publisher is remembered
    assert [position for position, _ in reopen_lasting().read({"a": None}, 9, 0.0, 10**6)["a"]] == positions
    assert reopen_lasting().backlog("a", positions[1]) == 0


def test_numbers_are_remembered_when_their_messages_are_gone(reopen_lasting: Callable[[], Hub]) -> None:
    hub = reopen_lasting()
    for number in (1, 2, 10**17):
        Publisher(reopen_lasting(), name="x").publish("a", *batch(number % 7), number=number)
    last = Publisher(hub, capacity=2, when_full="trim")
    for _ in range(3):
        last.publish("a", *batch(5))
    Publisher(reopen_lasting(), name="x").publish("a", *batch(1), number=10**17 - 1)
    assert stored(reopen_lasting()) == [5, 5]
    assert hub.backlog("a", None) == 2


def test_a_stream_that_was_deleted_forgets_the_numbers(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    for _ in range(2):
        Publisher(hub, name="x").publish("a", *batch(1), number=1)
        (message,) = (tmp_path / "tasks/a").glob("*.safetensors")
        message.unlink()


@needs_redis
def test_a_stream_that_was_deleted_in_redis_forgets_the_numbers(redis_server: RedisProcess) -> None:
    with redis_server.hubs("deleted") as reopen:
        hub = reopen()
        for _ in range(2):
            Publisher(hub, name="x").publish("a", *batch(1), number=1)
            assert hub.backlog("a", None) == 1
            hub._client.delete("deleted:stream:a")


def test_a_publisher_that_is_killed_before_it_notes_its_number_repeats_nothing(tmp_path: Path) -> None:
    record = tmp_path / "tasks/a/.publishers/record.json"
    Publisher(FolderHub(tmp_path), name="x").publish("a", *batch(1), number=1)
    before = record.read_bytes()
    Publisher(FolderHub(tmp_path), name="x").publish("a", *batch(2), number=2)
    record.write_bytes(before)
    Publisher(FolderHub(tmp_path), name="x").publish("a", *batch(2), number=2)
    assert stored(FolderHub(tmp_path)) == [1, 2]
    assert FolderHub(tmp_path).backlog("a", None) == 2


def test_threads_that_share_a_publisher_lose_nothing(tmp_path: Path) -> None:
    publisher = Publisher(FolderHub(tmp_path))
    threads = [
        threading.Thread(target=lambda: [publisher.publish("a", *batch(1)) for _ in range(10)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FolderHub(tmp_path).backlog("a", None) == 40


@pytest.mark.parametrize(
    ("name", "number"), [(None, 1), ("x", None), ("x", -1), ("x", 10**18), ("a:b", 1), ('"', 1), ("", 1), ("é", 1)]
)
def test_impossible_numbers_and_names_are_refused(name: str | None, number: int | None, tmp_path: Path) -> None:
    with pytest.raises(SpclError, match=r"number of the batch is|a publisher cannot be named"):
        Publisher(FolderHub(tmp_path), name=name).publish("a", *batch(0), number=number)
