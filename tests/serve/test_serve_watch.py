"""What has to wait for a hub waits in a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from list_hub import ListHub, batch
from serving import HUB, LONG, publish, running, settings_of, task, until
from spcl.serve import ServeSettings
from spcl.serve.watch import Ended, PutAway, Returned, Watch
from spcl.sources import (
    Hub,
    HubError,
    Rejected,
    ResetError,
    announce,
    encode_batch,
    encode_end,
    encode_start,
)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ServeSettings]:
    return partial(settings_of, tmp_path)


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


class HangingHub(ListHub):
    """Its methods of some names hang until it works."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.works = threading.Event()
        self.works.set()
        for name in names:
            setattr(self, name, partial(self._call, getattr(self, name)))

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        assert self.works.wait(20.0)
        return method(*arguments)


@pytest.mark.parametrize("names", [("tasks", "backlog"), ("dead_letter", "trim", "end")])
def test_a_hub_that_hangs_stops_neither_training_nor_its_end(
    names: tuple[str, ...], tmp_path: Path, make: Callable[..., ServeSettings]
) -> None:
    hub = HUB[str(tmp_path)] = HangingHub(*names)
    publish(hub, "a", 3)
    publish(hub, "b", 3)
    with running(make(ready_seconds=0.3)) as (service, _):
        until(lambda: service.status().samples == 12 and not service.faults())
        hub.works.clear()
        for data in (b"junk", *[encode_batch(batch(number)) for number in range(3)]):
            hub.append("a", data)
        hub.append("b", encode_end())
        until(lambda: task(service).batches == 6)
        until(lambda: any("has not answered" in fault for fault in service.faults()))
        begin = time.monotonic()
    assert time.monotonic() - begin < 8.0
    hub.works.set()
    with running(make()) as (service, _):
        until(lambda: (task(service).batches, task(service).dead_letters) == (6, 1) and list(hub.dead["a"]) == ["5"])
        until(lambda: task(service, "b").state == "finished" and hub.ended == {"b"} and not service.faults())
        assert (task(service, "b").batches, task(service, "b").dead_letters) == (3, 0)


@contextmanager
def watching(hub: Hub) -> Iterator[Watch]:
    watch = Watch(hub, dict, lambda *_: None)
    watch.start()
    yield watch
    watch.close()


def test_the_end_of_a_source_that_has_returned_is_not_carried_out() -> None:
    hub = ListHub()
    for data in (encode_end(), encode_batch(batch(1)), encode_start(announce("a", classes=2)), encode_batch(batch(2))):
        hub.append("a", data)
    with watching(hub) as watch:
        watch.await_return("a", "1")
        done = watch.take(LONG)
        assert done == Returned("a", after="2", late=1)
        watch.end("a", "1")  # the service has not noticed the return yet
        watch.put_away("b", Rejected("1", b"", "other"))
        assert isinstance(watch.take(LONG), PutAway)
        watch.put_away("b", Rejected("2", b"", "other"))
        assert isinstance(watch.take(LONG), PutAway)
        assert (hub.tasks(), hub.backlog("a", "2")) == (["a"], 2)


def test_a_stream_ends_once_no_message_after_its_end_is_unseen() -> None:
    hub = ListHub()
    for data in (encode_end(), encode_batch(batch(1)), b"junk"):
        hub.append("a", data)
    with watching(hub) as watch:
        watch.await_return("a", "1")
        watch.end("a", "1")
        assert watch.take(LONG) == Ended("a", late=2)
        assert hub.tasks() == []
        hub.reopen("a")
        hub.append("a", encode_start(announce("a", classes=2)))
        assert watch.take(LONG) == Returned("a", after="3", late=0)


class ReplacedHub(ListHub):
    """Its streams are not the ones that were read."""

    def read(self, after: Any, count: int, wait: float, max_bytes: int = 0) -> Any:
        raise ResetError("a", None, "1")


def test_a_source_whose_stream_was_replaced_does_not_return_and_the_hub_counts_as_there() -> None:
    hub = ReplacedHub()
    hub.append("a", encode_start(announce("a", classes=2)))
    with watching(hub) as watch:
        watch.await_return("a", "1")
        until(lambda: watch.tasks == ["a"] and "a" not in watch._returning)
        watch.end("a", "1")
        assert isinstance(watch.take(LONG), Ended)
        assert hub.tasks() == []
        assert watch.away_seconds < 1.0
