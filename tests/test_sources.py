"""Hubs keep their promises, batches survive the wire, and anything else is refused with a reason."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from list_hub import ListHub, batch, damaged, outcomes, source_of
from redis_process import RedisProcess, needs_redis
from spcl.errors import DataError, SpclError, TaskError
from spcl.sources import (
    FolderHub,
    Hub,
    HubError,
    Message,
    Publisher,
    Rejected,
    Schema,
    decode,
    encode_batch,
    encode_start,
)
from spcl.streams import LiveStream


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["list", "folder", pytest.param("redis", marks=needs_redis)])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Hub]]:
    """Opens the same hub, as another process would."""
    if request.param == "list":
        hub = ListHub()
        yield lambda: hub
    elif request.param == "folder":
        yield lambda: FolderHub(tmp_path)
    else:
        with request.getfixturevalue("redis_server").hubs(tmp_path.name) as reopen:
            yield reopen


def values(messages: Any) -> list[float]:
    return [float(message.batch[0][0, 0]) for message in messages if isinstance(message, Message)]


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
    assert values(source_of(reopen(), schema=Schema.of(classes=2)).read(middle)) == list(range(8, 20))
    assert hub.backlog("a", middle) == 22 - 9
    source_of(hub).commit(middle)
    assert hub.backlog("a", None) <= 14
    assert values(source_of(reopen(), schema=Schema.of(classes=2)).read(middle)) == list(range(8, 20))


def test_numbers_go_on_after_everything_was_committed(reopen: Callable[[], Hub]) -> None:
    Publisher(reopen()).publish("a", *batch(0))
    source = source_of(reopen(), first_sight=Schema.of(classes=2))
    first = next(source.read(None))
    source.commit(first.position)
    Publisher(reopen()).publish("a", *batch(1))
    assert values([next(source.read(first.position))]) == [1]


def test_ended_tasks_are_refused_and_not_listed(reopen: Callable[[], Hub]) -> None:
    publisher = Publisher(reopen())
    publisher.publish("a", *batch(0))
    for _ in range(2):
        reopen().end("a")
    assert reopen().tasks() == []
    assert reopen().backlog("a", None) == 0
    with pytest.raises(TaskError, match="has ended"):
        publisher.publish("a", *batch(1))


def test_concurrent_publishers_lose_nothing(reopen: Callable[[], Hub]) -> None:
    def publish(start: int) -> None:
        publisher = Publisher(reopen())
        for number in range(start, start + 15):
            publisher.publish("a", *batch(number))

    if isinstance(reopen(), ListHub):
        pytest.skip("its append is not atomic")
    threads = [threading.Thread(target=publish, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    seen = values(islice(source_of(reopen(), first_sight=Schema.of(classes=2)).read(None), 45))
    for thread in threads:
        thread.join()
    assert sorted(seen) == [*range(15), *range(100, 115), *range(200, 215)]
    for start in (0, 100, 200):
        assert [number for number in seen if start <= number < start + 15] == list(range(start, start + 15))


def test_blocking_publishers_wait_for_the_learner(reopen: Callable[[], Hub]) -> None:
    publisher = Publisher(reopen(), capacity=5, patience=0.1)
    for number in range(5):
        publisher.publish("a", *batch(number))
    with pytest.raises(HubError, match="has been full with 5 messages"):
        publisher.publish("a", *batch(5))
    source = source_of(reopen(), first_sight=Schema.of(classes=2))
    messages = list(islice(source.read(None), 5))
    source.commit(messages[-1].position)
    publisher.publish("a", *batch(5))
    assert values([next(source.read(messages[-1].position))]) == [5]


def test_trimming_publishers_keep_the_newest_and_the_task_stays_known(reopen: Callable[[], Hub]) -> None:
    publisher = Publisher(reopen(), capacity=4, when_full="trim")
    publisher.start("a", classes=2)
    for number in range(10):
        publisher.publish("a", *batch(number))
    source = source_of(reopen())
    assert values(islice(source.read(None), 4)) == [6, 7, 8, 9]
    assert source.schema == Schema.of(classes=2)


def test_batches_wait_until_their_task_is_announced(reopen: Callable[[], Hub]) -> None:
    Publisher(reopen()).publish("a", *batch(7))
    source = source_of(reopen())
    with LiveStream({"a": source}, patience=0.3) as stream:
        assert list(stream) == []
        assert reopen().backlog("a", None) == 1
        source.announce(Schema.of(classes=2))
        stream.patience = 10.0
        assert float(next(iter(stream)).batches["a"][0][0, 0]) == 7
        with pytest.raises(TaskError, match="is announced as"):
            source.announce(Schema.of(classes=3))


def test_what_does_not_fit_is_rejected_with_the_reason_and_the_rest_is_read(reopen: Callable[[], Hub]) -> None:
    hub = reopen()
    publisher = Publisher(hub)
    publisher.start("a", classes=2)
    hub.append("a", b"junk")
    publisher.publish("a", torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    publisher.publish("a", torch.zeros(2, 3), torch.tensor([0, 2]))
    publisher.publish("a", np.zeros((2, 3)), np.array([0, 1], dtype=np.int32))
    hub.append("a", encode_start(Schema.of(classes=5)))
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


def test_partial_and_foreign_files_do_not_disturb(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    folder = tmp_path / "tasks" / "a"
    folder.mkdir()
    (folder / ".half.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("hello")
    (folder / "2026-01.safetensors").write_bytes(encode_batch(batch(1)))
    (folder / "2026-02.safetensors").write_bytes(encode_batch(batch(2)))
    publisher = Publisher(hub)
    for number in (3, 4):
        publisher.publish("a", *batch(number))
    publisher.end("a")
    assert values(source_of(hub, first_sight=Schema.of(classes=2)).read(None)) == [1, 2, 3, 4]


@needs_redis
def test_what_is_published_while_redis_is_killed_arrives_once(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server, server.hubs() as reopen:
        seen, outages = read_while_it_is_killed(server, reopen)
    assert seen == list(range(400))
    assert [type(each) for each in outages] == [HubError, type(None)]


def read_while_it_is_killed(
    server: RedisProcess, reopen: Callable[[], Hub]
) -> tuple[list[float], list[Exception | None]]:
    """Return what is read of 400 batches, and the outages."""
    killed = threading.Event()

    def publish() -> None:
        publisher = Publisher(reopen())
        for number in range(400):
            publisher.publish("a", *batch(number))
            if number == 100:
                killed.wait()

    thread = threading.Thread(target=publish)
    thread.start()
    outages: list[Exception | None] = []
    source = source_of(reopen(), first_sight=Schema.of(classes=2), on_outage=lambda _, e: outages.append(e))
    reader = source.read(None)
    seen = values(islice(reader, 20))

    def kill_for_a_moment() -> None:
        killed.set()
        server.kill()
        time.sleep(0.2)
        server.start()

    killing = threading.Thread(target=kill_for_a_moment)
    killing.start()
    seen += values(islice(reader, 380))
    for each in (thread, killing):
        each.join()
    return seen, outages


def test_closing_ends_reading_at_once(reopen: Callable[[], Hub]) -> None:
    source = source_of(reopen())
    stream = LiveStream({"a": source})
    (thread,) = stream._threads
    begin = time.monotonic()
    stream.close(timeout=10.0)
    assert not thread.is_alive()
    assert time.monotonic() - begin < 5.0


def test_a_hub_that_was_closed_can_be_used_again(reopen: Callable[[], Hub]) -> None:
    hub = reopen()
    for _ in range(2):
        Publisher(hub).publish("a", *batch(0))
        hub.close()
        hub.close()
    assert hub.backlog("a", None) == 2


# -- the live stream


def filled(hub: Hub, tasks: dict[str, int]) -> None:
    publisher = Publisher(hub)
    for task, count in tasks.items():
        publisher.start(task, classes=2)
        for number in range(count):
            publisher.publish(task, *batch(number))
        publisher.end(task)


def test_a_stream_goes_on_from_its_state(reopen: Callable[[], Hub]) -> None:
    filled(reopen(), {"a": 9, "b": 5})
    seen: dict[str, list[float]] = {"a": [], "b": []}
    schema = Schema.of(classes=2)
    state: dict[str, Any] | None = None
    for life in range(20):
        sources = {name: source_of(reopen(), name, schema=schema) for name in seen}
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


def test_together_the_composition_does_not_depend_on_the_pace() -> None:
    def paced(count: int, pause: float) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(count):
            time.sleep(pause)
            yield batch(number)

    for pauses in ((0.0, 0.004), (0.004, 0.0)):
        sources = {"a": paced(4, pauses[0]), "b": paced(7, pauses[1])}
        with LiveStream(sources, together=True, patience=10.0) as stream:
            events = []
            for moment in stream:
                events += [sorted(moment.batches)] if moment.batches else []
                events += [[f"end of {name}"] for name in moment.ended]
        assert events == [["a", "b"]] * 4 + [["end of a"]] + [["b"]] * 3 + [["end of b"]]


def test_the_checkpoint_before_the_last_stays_good(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    filled(hub, {"a": 6})
    with LiveStream({"a": source_of(hub)}, patience=10.0) as stream:
        states = []
        for _ in islice(stream, 4):
            states.append(stream.state_dict())
            stream.commit()
    with LiveStream({"a": source_of(hub, schema=Schema.of(classes=2))}, patience=10.0) as again:
        again.load_state_dict(states[-2])
        assert [float(m.batches["a"][0][0, 0]) for m in again if m.batches] == [3, 4, 5]
        assert hub.backlog("a", None) == 8 - 3  # the announcement and the batches 0 and 1 are gone
    with LiveStream({"a": source_of(hub, schema=Schema.of(classes=2))}, patience=10.0) as again:
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
        with LiveStream({"a": source_of(hub, schema=Schema.of(classes=2))}, patience=10.0) as again:
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


# -- the wire

SHAPES = st.lists(st.integers(0, 3), max_size=2)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool, torch.bfloat16])


@st.composite
def tensors(draw: st.DrawFn, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(rows, *draw(SHAPES), generator=generator)
    return values.to(draw(DTYPES))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, Tensor]:
    rows = draw(st.integers(1, 3))
    names = st.dictionaries(st.text(min_size=1, max_size=5), tensors(rows), min_size=1, max_size=3)
    parts = st.lists(tensors(rows), min_size=1, max_size=12).map(tuple)
    return draw(st.one_of(tensors(rows), names, parts)), draw(tensors(rows))


@given(batches())
@settings(max_examples=60, deadline=None)
def test_batches_survive_the_wire(given_batch: tuple[Any, Tensor]) -> None:
    letter = decode(encode_batch(given_batch, Schema.of(classes=("x", "ü"))))
    assert letter.batch is not None
    assert letter.schema == Schema.of(classes=["x", "ü"])
    (x, y), (sent, targets) = letter.batch, given_batch
    assert type(x) is type(sent)
    pairs = [(y, targets)]
    if isinstance(sent, dict):
        assert x.keys() == sent.keys()
        pairs += [(x[name], sent[name]) for name in sent]
    else:
        pairs += list(zip(x, sent, strict=True)) if isinstance(sent, tuple) else [(x, sent)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_parts_that_share_memory_can_be_sent() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    letter = decode(encode_batch(((x, x.T.reshape(2, 3), x[:, ::2]), x[:, 0])))
    assert letter.batch is not None
    assert [part.tolist() for part in letter.batch[0]][2] == [[0, 2], [3, 5]]


def test_damaged_bytes_are_letters_or_data_errors() -> None:
    counts = {"letter": 0, "error": 0}
    for data in damaged(3000, seed=1):
        try:
            decode(data)
        except DataError:
            counts["error"] += 1
        else:
            counts["letter"] += 1
    assert min(counts.values()) > 50, counts


@pytest.mark.parametrize(
    ("classes", "kind"),
    [(0, "classification"), (None, "classification"), (["a", "a"], "multilabel"), (10**9, "regression"), (2, "other")],
)
def test_impossible_tasks_are_refused(classes: Any, kind: Any) -> None:
    with pytest.raises(TaskError, match="a task cannot be"):
        Schema.of(kind, classes)


@pytest.mark.parametrize("name", ["", "memory", "../x", ".x", "a/b", "x" * 101, 5])
def test_impossible_names_are_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="a task cannot be named"):
        Publisher(FolderHub(tmp_path)).publish(name, *batch(0))


@pytest.mark.parametrize("options", [{"capacity": 1}, {"when_full": "wait"}])
def test_impossible_publishers_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpclError, match="capacity is"):
        Publisher(FolderHub(tmp_path), **options)


@pytest.mark.parametrize(
    ("schema", "targets", "expected"),
    [
        (Schema.of(classes=3), torch.tensor([0.2, 0.3, 0.5]), torch.float32),
        (Schema.of(classes=3), torch.tensor([0.2, 0.3, 0.9]), "do not add up to 1"),
        (Schema.of(classes=3), torch.tensor([float("nan"), 0.0, 1.0]), "do not add up to 1"),
        (Schema.of(classes=3), torch.tensor(True), "one whole number per sample"),
        (Schema.of("regression"), torch.tensor(0.5), torch.float32),
        (Schema.of("regression", 2), torch.tensor(0.5), "give 2 number"),
        (Schema.of("multilabel", 2), torch.tensor([True, False]), torch.float32),
        (Schema.of("multilabel", 2), torch.tensor([2, 0]), "other values than 0 and 1"),
        (Schema.of("multilabel", 2), torch.tensor([1]), "give 2 zeros or ones"),
    ],
)
def test_targets_are_checked_by_kind(schema: Schema, targets: Tensor, expected: Any) -> None:
    given_batch = (torch.zeros(2, 3), torch.stack([targets, targets]))
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            schema.fit(given_batch, "float32[3]")
    else:
        y = schema.fit(given_batch, "float32[3]")[1]
        assert y.dtype == expected
        assert y.shape == (2, schema.outputs)
