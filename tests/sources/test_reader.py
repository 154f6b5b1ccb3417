"""The streams of many tasks are read together, checked, and read on from a checkpoint."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from list_hub import ListHub, batch, filled, outcomes, source_of
from serving import publish
from spcl.errors import TaskError
from spcl.learner import Learner
from spcl.methods import SORO
from spcl.sources import (
    Entry,
    FolderHub,
    Hub,
    HubError,
    Message,
    Publisher,
    Rejected,
    announce,
    encode_batch,
    encode_start,
)
from spcl.streams import LiveStream
from spcl.tasks import TaskDescription

TWO = announce("a", classes=2)


def test_batches_wait_until_their_task_is_announced(reopen: Callable[[], Hub]) -> None:
    Publisher(reopen()).publish("a", *batch(7))
    source = source_of(reopen())
    with LiveStream({"a": source}, patience=0.3) as stream:
        assert list(stream) == []
        assert reopen().backlog("a", None) == 1
        source.announce(TWO)
        stream.patience = 10.0
        assert float(next(iter(stream)).batches["a"][0][0, 0]) == 7
        with pytest.raises(TaskError, match="is announced as"):
            source.announce(announce("a", classes=3))


def test_what_does_not_fit_is_rejected_with_the_reason_and_the_rest_is_read(reopen: Callable[[], Hub]) -> None:
    hub = reopen()
    publisher = Publisher(hub)
    publisher.start("a", classes=2)
    hub.append("a", b"junk")
    publisher.publish("a", torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    publisher.publish("a", torch.zeros(2, 3), torch.tensor([0, 2]))
    publisher.publish("a", np.zeros((2, 3)), np.array([0, 1], dtype=np.int32))
    hub.append("a", encode_start(announce("a", classes=5)))
    publisher.publish("a", torch.zeros(100, 100), torch.zeros(100))
    publisher.end("a")
    found = list(source_of(hub, max_bytes=10_000).read(None))
    reasons = outcomes(found)
    expected = ["no safetensors", "float32[4]", "label 2", "learned", "announced as", "at most 10000"]
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True))
    for _ in range(2):  # as after a crash
        for each in found:
            if isinstance(each, Rejected):
                hub.dead_letter("a", each.position, each.data, each.reason)


@pytest.mark.parametrize(
    ("kind", "classes", "targets", "expected"),
    [
        ("classification", 3, torch.tensor([0.2, 0.3, 0.5]), torch.float32),
        ("classification", 3, torch.tensor(2, dtype=torch.uint8), torch.int64),
        ("classification", 3, torch.tensor([0.2, 0.3, 0.9]), "do not add up to 1"),
        ("classification", 3, torch.tensor([float("nan"), 0.0, 1.0]), "do not add up to 1"),
        ("classification", 3, torch.tensor(True), "class labels must be a vector of int64"),
        ("regression", 1, torch.tensor(0.5), torch.float32),
        ("regression", 2, torch.tensor(0.5), r"numbers of shape (samples, 2)"),
        ("multilabel", 2, torch.tensor([True, False]), torch.float32),
        ("multilabel", 2, torch.tensor([2, 0]), "a multilabel task hold 2"),
        ("multilabel", 2, torch.tensor([1]), "zeros or ones of shape (samples, 2)"),
    ],
)
def test_targets_are_checked_by_kind(kind: str, classes: int, targets: Tensor, expected: Any) -> None:
    source = source_of(ListHub(), description=TaskDescription.of("a", kind, classes))
    data = encode_batch((torch.zeros(2, 3), torch.stack([targets, targets])))
    (message,) = source.open(None, [("1", data)]).messages
    if isinstance(expected, str):
        assert isinstance(message, Rejected)
        assert expected in message.reason
    else:
        assert isinstance(message, Message)
        assert message.batch[1].dtype == expected


def test_closing_ends_reading_at_once(reopen: Callable[[], Hub]) -> None:
    source = source_of(reopen())
    stream = LiveStream({"a": source})
    (thread,) = stream._threads
    begin = time.monotonic()
    stream.close(timeout=10.0)
    assert not thread.is_alive()
    assert time.monotonic() - begin < 5.0


# -- one thread for all tasks of a hub


class ObservedHub(ListHub):
    """Notes which threads read, how many tasks at once, and refuses to read some."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.most_tasks = 0
        self.unreadable: set[str] = set()

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        self.threads.add(threading.get_ident())
        self.most_tasks = max(self.most_tasks, len(after))
        if self.unreadable & after.keys():
            raise PermissionError("not for you")
        return super().read(after, count, wait)


def served(tasks: int, batches: int) -> tuple[ObservedHub, list[str]]:
    hub, names = ObservedHub(), [f"task-{number}" for number in range(tasks)]
    publisher = Publisher(hub)
    for name in names:
        for number in range(batches):
            publisher.publish(name, *batch(number))
    return hub, names


@pytest.mark.parametrize("capacity", [1, 2, 5, 8])
def test_one_thread_reads_all_tasks_of_a_hub_at_most_capacity_ahead(capacity: int) -> None:
    hub, names = served(16, 12)
    sources = {name: source_of(hub, name, description=TWO.task) for name in names}
    seen: dict[str, list[float]] = {name: [] for name in names}
    with LiveStream(sources, capacity=capacity, together=True, patience=10.0) as stream:
        for step, moment in enumerate(islice(stream, 12)):
            for name, (x, _) in moment.batches.items():
                seen[name].append(float(x[0, 0]))
            assert all(read <= step + 1 + capacity for read in hub.furthest.values())
    assert seen == {name: list(range(12)) for name in names}
    assert len(hub.threads) == 1
    assert hub.most_tasks == 16


def test_a_stream_that_cannot_be_read_does_not_stop_the_others() -> None:
    hub, names = served(3, 4)
    hub.unreadable = {"task-1"}
    outages: list[tuple[str, type]] = []
    sources = {
        name: source_of(
            hub, name, description=TWO.task, on_outage=lambda task, error: outages.append((task, type(error)))
        )
        for name in names
    }
    with LiveStream(sources, patience=0.5) as stream:
        assert sum(len(moment.batches) for moment in stream) == 8
        assert stream.delivered == {"task-0": 4, "task-2": 4}
        hub.unreadable = set()
        assert sum(len(moment.batches) for moment in stream) == 4
    assert outages == [("task-1", PermissionError), ("task-1", type(None))]


class HangingHub(ListHub):
    """Does not answer until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        self.answers.wait()
        return super().read(after, count, wait)


@pytest.mark.timeout(60)
def test_a_hub_that_hangs_is_reported_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spcl.streams.live.HANGING_SECONDS", 0.2)
    hanging, good = HangingHub(), ListHub()
    outages: list[tuple[str, Exception | None]] = []
    sources = {
        name: source_of(hub, name, description=TWO.task, on_outage=lambda task, error: outages.append((task, error)))
        for name, hub in (("hanging", hanging), ("good", good))
    }
    for name, source in sources.items():
        Publisher(source.hub).publish(name, *batch(1))
    with LiveStream(sources, patience=0.1) as stream:
        while not sources["hanging"].is_out:
            list(stream)
        assert stream.delivered == {"good": 1}
        hanging.answers.set()
        while "hanging" not in stream.delivered:
            list(stream)
        assert not sources["hanging"].is_out
    assert [(task, str(error)) for task, error in outages] == [
        ("hanging", "the hub has not answered for 0.2 s"),
        ("hanging", "None"),
    ]


def test_closing_a_stream_waits_for_no_hub_that_hangs() -> None:
    hub = HangingHub()
    stream = LiveStream({"a": source_of(hub, description=TWO.task)}, patience=0.1)
    begin = time.monotonic()
    assert list(stream) == []
    stream.close()
    assert time.monotonic() < begin + 5.0
    hub.answers.set()


# -- checkpoints


def test_a_stream_goes_on_from_its_state(reopen: Callable[[], Hub]) -> None:
    filled(reopen(), {"a": 9, "b": 5})
    seen: dict[str, list[float]] = {"a": [], "b": []}
    schema = TWO
    state: dict[str, Any] | None = None
    for life in range(20):
        sources = {name: source_of(reopen(), name, description=schema.task) for name in seen}
        with LiveStream(sources, patience=10.0) as stream:
            if state is not None:
                stream.load_state_dict(state)
            for moment in islice(stream, 1 + life % 3):  # what is read ahead is lost with the process
                for name, (x, _) in moment.batches.items():
                    seen[name].append(float(x[0, 0]))
            state = stream.state_dict()
            stream.commit()
            if len(state["ended"]) == 2:
                break
    assert seen == {"a": list(range(9)), "b": list(range(5))}


def test_the_checkpoint_before_the_last_stays_good(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    filled(hub, {"a": 6})
    with LiveStream({"a": source_of(hub)}, patience=10.0) as stream:
        states = []
        for _ in islice(stream, 4):
            states.append(stream.state_dict())
            stream.commit()
    with LiveStream({"a": source_of(hub, description=TWO.task)}, patience=10.0) as again:
        again.load_state_dict(states[-2])
        assert [float(m.batches["a"][0][0, 0]) for m in again if m.batches] == [3, 4, 5]
        assert hub.backlog("a", None) == 8 - 3  # the announcement and the batches 0 and 1 are gone
    with LiveStream({"a": source_of(hub, description=TWO.task)}, patience=10.0) as again:
        again.load_state_dict(states[-1])
        again.commit()
    assert hub.backlog("a", None) == 8 - 4  # the checkpoint that was loaded is one of the last two


def taken(stream: LiveStream) -> list[float]:
    """The values of all batches, with a checkpoint after every moment."""
    seen = []
    for moment in stream:
        seen += [float(x[0, 0]) for x, _ in moment.batches.values()]
        stream.state_dict()
        stream.commit()
    return seen


def test_a_source_that_has_ended_forgets_all_its_batches(reopen: Callable[[], Hub]) -> None:
    hub = reopen()
    filled(hub, {"a": 6, "b": 9})
    with LiveStream({name: source_of(hub, name) for name in "ab"}, together=True, patience=10.0) as stream:
        assert sorted(taken(stream)) == sorted([*range(6), *range(9)])
        for _ in range(2):
            stream.commit()
        kept = {name: hub.backlog(name, None) for name in "ab"}
        assert max(kept.values()) <= 1  # at most the announcement of the end
        assert hub.backlog("a", stream.ends["a"]) == hub.backlog("b", stream.ends["b"]) == 0


def test_a_source_that_had_ended_forgets_after_a_restart(reopen: Callable[[], Hub]) -> None:
    hub = reopen()
    filled(hub, {"a": 4})
    with LiveStream({"a": source_of(hub)}, patience=10.0) as stream:
        assert len([moment for moment in stream if moment.batches]) == 4
        state = stream.state_dict()
    assert hub.backlog("a", None) == 6
    with LiveStream({"a": source_of(hub)}, patience=10.0) as again:
        again.load_state_dict(state)
        assert list(again) == []
        again.commit()
        assert hub.backlog("a", None) <= 1


def test_both_last_checkpoints_see_the_end_of_a_source(reopen: Callable[[], Hub]) -> None:
    hub, states = reopen(), list[dict[str, Any]]()
    filled(hub, {"a": 3})
    with LiveStream({"a": source_of(hub)}, patience=10.0) as stream:
        for _ in stream:
            states.append(stream.state_dict())
            stream.commit()
    for state in states[-2:]:
        with LiveStream({"a": source_of(hub, description=TWO.task)}, patience=10.0) as again:
            again.load_state_dict(state)
            missing = 3 - state["delivered"]["a"]
            assert len([moment for moment in again if moment.batches]) == missing
            assert again.ended == ("a",)


def test_a_removed_source_forgets_what_was_delivered_and_no_more(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    filled(hub, {"a": 9})
    with LiveStream({"a": source_of(hub)}, capacity=4, patience=10.0) as stream:
        list(islice(stream, 3))
        stream.remove("a")
        list(stream)
        for _ in range(3):
            stream.commit()
        assert stream.ends == {"a": stream.positions["a"]}
        assert hub.backlog("a", stream.ends["a"]) == 9 - 3 + 1


class UntrimmableHub(ListHub):
    """Is away whenever something is to be deleted."""

    def trim(self, task: str, upto: str) -> None:
        raise HubError("it is down")


def test_fitting_survives_a_hub_that_is_away_at_a_checkpoint(tmp_path: Path) -> None:
    hub = UntrimmableHub()
    publish(hub, "a", 6).end("a")
    learner = Learner(nn.Linear(3, 4), SORO())
    learner.add_task("a", classes=2)
    with LiveStream({"a": source_of(hub)}, patience=10.0) as stream:
        learner.fit(stream, checkpoint=tmp_path / "learner", every=0.0)
    assert learner.steps == 6
