import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from spcl.errors import CheckpointError, DataError, SpclError, TaskError
from spcl.streams import Failure, LiveStream, Moment

LONG = 10.0  # seconds until a test times out; passing tests take less


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def batch(number: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([number]), torch.tensor([number % 2])


def counting(count: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    yield from map(batch, range(start, start + count))


def failing_after(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from counting(count)
    raise OSError("cable pulled")


def numbers(moments: list[Moment], name: str) -> list[int]:
    return [int(moment.batches[name][0]) for moment in moments if name in moment.batches]


class Feed:
    """A source that yields, raises or ends on command."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()

    def push(self, number: int) -> None:
        self._orders.put(number)

    def fail(self) -> None:
        self._orders.put(OSError("told to"))

    def finish(self) -> None:
        self._orders.put(None)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while (order := self._orders.get()) is not None:
            if isinstance(order, Exception):
                raise order
            yield batch(order)


def test_batches_of_every_source_arrive_in_order() -> None:
    with LiveStream({"a": counting(50), "b": counting(20, start=100), "c": counting(1)}, patience=LONG) as stream:
        moments = list(stream)
    assert numbers(moments, "a") == list(range(50))
    assert numbers(moments, "b") == list(range(100, 120))
    assert numbers(moments, "c") == [0]
    assert [moment.step for moment in moments] == list(range(len(moments)))
    assert stream.delivered == {"a": 50, "b": 20, "c": 1}
    assert Counter(name for moment in moments for name in moment.started) == {"a": 1, "b": 1, "c": 1}
    assert Counter(name for moment in moments for name in moment.ended) == {"a": 1, "b": 1, "c": 1}
    for name in "abc":
        steps = [moment.step for moment in moments if name in moment.batches]
        assert name in moments[steps[0]].started
        assert any(name in moment.ended for moment in moments[steps[-1] :])


def test_moment_has_one_batch_of_every_queued_source() -> None:
    with LiveStream({"a": counting(3), "b": counting(3)}, capacity=4) as stream:
        wait_until(lambda: not any(thread.is_alive() for thread in stream._threads))
        moments = list(stream)
    assert [list(moment.batches) for moment in moments] == [["a", "b"]] * 3
    assert [moment.ended for moment in moments] == [(), (), ("a", "b")]


def test_stalled_source_does_not_block_others() -> None:
    stalled = Feed()
    with LiveStream({"stalled": stalled, "fast": counting(200)}, capacity=2, patience=LONG) as stream:
        moments = [next(iter(stream)) for _ in range(200)]
        assert numbers(moments, "fast") == list(range(200))
        stalled.push(7)
        stalled.finish()
        assert numbers(list(stream), "stalled") == [7]


@pytest.mark.parametrize("capacity", [1, 3])
def test_source_is_read_at_most_capacity_ahead(capacity: int) -> None:
    made = 0

    def source() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal made
        for number in range(30):
            made += 1
            yield batch(number)

    with LiveStream({"eager": source()}, capacity=capacity, patience=LONG) as stream:
        for taken, _ in enumerate(filter(lambda moment: moment.batches, stream), start=1):
            assert made <= taken + capacity
            wait_until(lambda: made == min(taken + capacity, 30))  # noqa: B023 - called at once
    assert made == 30


def test_failed_source_is_reported_and_can_be_restarted() -> None:
    reports: list[tuple[str, Failure]] = []

    def bring_back(name: str, failure: Failure) -> None:
        reports.append((name, failure))
        assert stream.failed == (name,)
        stream.restart(name, failing_after(2) if failure.count < 3 else counting(1, start=50))

    with LiveStream({"weak": failing_after(2), "sound": counting(5)}, patience=LONG, on_failure=bring_back) as stream:
        moments = list(stream)
    assert numbers(moments, "weak") == [0, 1, 0, 1, 0, 1, 50]
    assert numbers(moments, "sound") == list(range(5))
    assert [(name, failure.count, str(failure.exception)) for name, failure in reports] == [
        ("weak", count, "cable pulled") for count in (1, 2, 3)
    ]
    assert stream.failures["weak"] is reports[-1][1]
    assert 0 <= time.time() - stream.failures["weak"].time < 60
    assert sum("weak" in moment.started for moment in moments) == sum("weak" in moment.ended for moment in moments) == 1
    assert stream.failed == stream.running == ()


def test_failure_is_logged_and_does_not_end_the_task(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LiveStream({"weak": failing_after(1)}, patience=LONG) as stream:
        moments = list(stream)
        assert numbers(moments, "weak") == [0]
        assert not any(moment.ended for moment in moments)
        assert stream.failed == ("weak",)
        assert "source 'weak' failed" in caplog.text
        assert "cable pulled" in caplog.text
        stream.restart("weak", counting(2, start=10))
        again = list(stream)
    assert numbers(again, "weak") == [10, 11]
    assert [moment.started for moment in again if moment.started] == []
    assert again[-1].ended == ("weak",)


def test_failed_source_can_be_removed() -> None:
    with LiveStream({"weak": failing_after(1)}, patience=LONG) as stream:
        list(stream)
        stream.remove("weak")
        assert [moment.ended for moment in stream] == [("weak",)]


def test_error_of_the_callback_propagates() -> None:
    def give_up(name: str, failure: Failure) -> None:
        raise RuntimeError(f"{name} is vital") from failure.exception

    with (
        LiveStream({"weak": failing_after(0)}, patience=LONG, on_failure=give_up) as stream,
        pytest.raises(RuntimeError, match="weak is vital"),
    ):
        list(stream)


def test_every_failure_is_reported_once_even_if_the_callback_raises() -> None:
    reports: list[tuple[str, int]] = []

    def give_up(name: str, failure: Failure) -> None:
        reports.append((name, failure.count))
        raise RuntimeError("alarm")

    with LiveStream({"a": failing_after(0), "b": failing_after(0)}, patience=LONG, on_failure=give_up) as stream:
        wait_until(lambda: set(stream.failed) == {"a", "b"})
        stream.restart("a", failing_after(0))  # before its first failure is reported
        wait_until(lambda: stream.failures["a"].count == 2)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="alarm"):
                list(stream)
        assert list(stream) == []
    assert sorted(reports) == [("a", 1), ("a", 2), ("b", 1)]


@pytest.mark.parametrize(
    "yielded",
    [
        5,
        torch.zeros(2, 2),
        (torch.zeros(2), [0, 1]),
        (torch.zeros(2), torch.zeros(2), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.tensor(1), torch.tensor(1)),
    ],
)
def test_invalid_batches_are_failures(yielded: Any) -> None:
    failures: list[Failure] = []
    with LiveStream(
        {"odd": [yielded]}, patience=LONG, on_failure=lambda _, failure: failures.append(failure)
    ) as stream:
        assert list(stream) == []
    assert [type(failure.exception) for failure in failures] == [DataError]


def test_numpy_batches_become_tensors() -> None:
    buffer = np.zeros((2, 3), dtype=np.float32)

    def driver() -> Iterator[tuple[Any, Any]]:
        for number in range(3):
            buffer[:] = number  # the driver's own memory, which it uses again
            yield buffer, np.array([number, number])

    with LiveStream({"numpy": driver()}, patience=LONG) as stream:
        moments = list(stream)
    assert not stream.failures
    pairs = [moment.batches["numpy"] for moment in moments if moment.batches]
    assert [x.tolist() for x, _ in pairs] == [[[number] * 3] * 2 for number in range(3)]
    assert [(x.dtype, y.dtype, y.tolist()) for x, y in pairs] == [
        (torch.float32, torch.int64, [number] * 2) for number in range(3)
    ]


def test_arrays_that_cannot_become_tensors_are_named() -> None:
    with LiveStream({"odd": [(np.array([None]), np.zeros(1))]}, patience=LONG) as stream:
        assert list(stream) == []
    assert "type object and shape (1,) cannot become a tensor" in str(stream.failures["odd"].exception)


def test_a_stalled_source_is_shown() -> None:
    stalled, sound = Feed(), Feed()
    with LiveStream({"stalled": stalled, "sound": sound, "paused": counting(9)}, capacity=2, patience=LONG) as stream:
        begin = time.time()
        stalled.push(0)
        wait_until(lambda: "stalled" in stream.last_seen and len(stream._sources["paused"].messages) == 2)
        assert begin <= stream.last_seen["stalled"] <= time.time()
        assert "sound" not in stream.last_seen
        time.sleep(0.05)
        sound.push(0)
        wait_until(lambda: "sound" in stream.last_seen)
        assert stream.last_seen["sound"] > stream.last_seen["stalled"]
        wait_until(lambda: stream.lag["stalled"] > 0.1)
        stalled.push(1)
        wait_until(lambda: stream.lag["stalled"] < 0.1)
        assert stream.lag["paused"] == 0.0  # it waits for the learner, not the learner for it
        for feed in (stalled, sound):
            feed.finish()
        list(stream)
        assert stream.lag == {}
        assert set(stream.last_seen) == {"stalled", "sound", "paused"}


def test_a_source_that_never_begins_is_shown_too() -> None:
    opened = threading.Event()

    class Connecting:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            opened.wait(LONG)
            return counting(1)

    with LiveStream({"slow": Connecting()}, patience=LONG) as stream:
        wait_until(lambda: stream.lag["slow"] > 0.01)
        assert stream.last_seen == {}
        opened.set()
        assert numbers(list(stream), "slow") == [0]


@pytest.mark.parametrize("error", [SystemExit, StopIteration, KeyboardInterrupt])
def test_every_exception_of_a_source_is_reported(error: type[BaseException]) -> None:
    class Odd:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            raise error

    seen: list[str] = []
    with LiveStream({"odd": Odd()}, patience=LONG, on_failure=lambda name, _: seen.append(name)) as stream:
        assert list(stream) == []
    assert seen == ["odd"]
    assert isinstance(stream.failures["odd"].exception, error)


def test_data_loader_is_a_source() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10), torch.arange(10)), batch_size=4)
    with LiveStream({"loader": loader}, patience=LONG) as stream:
        sizes = [len(moment.batches["loader"][0]) for moment in stream if moment.batches]
    assert sizes == [4, 4, 2]


def test_sources_are_added_and_removed_while_iterating() -> None:
    first, second = Feed(), Feed()
    first.push(1)
    with LiveStream({"first": first}, patience=LONG) as stream:
        moments = iter(stream)
        assert next(moments).started == ("first",)
        waiting = threading.Thread(target=lambda: (second.push(2), stream.add("second", second)))
        waiting.start()
        moment = next(moments)
        waiting.join()
        assert (list(moment.batches), moment.started) == (["second"], ("second",))
        threading.Thread(target=lambda: stream.remove("first")).start()
        moment = next(moments)
        assert (moment.batches, moment.started, moment.ended) == ({}, (), ("first",))
        assert stream.running == ("second",)
        second.finish()
        assert next(moments).ended == ("second",)
        assert list(moments) == []
        first.finish()


def test_removing_discards_queued_batches() -> None:
    with LiveStream({"a": counting(100)}, capacity=3, patience=LONG) as stream:
        moments = iter(stream)
        next(moments)
        stream.remove("a")
        assert [(moment.batches, moment.ended) for moment in moments] == [({}, ("a",))]


def test_removed_source_is_ignored() -> None:
    feed = Feed()
    with LiveStream({"a": feed}, patience=LONG) as stream:
        stream.remove("a")
        feed.fail()
        wait_until(lambda: not any(thread.is_alive() for thread in stream._threads))
        assert list(stream) == []
    assert stream.failures == {}


def test_source_without_batches_neither_starts_nor_ends() -> None:
    silent = Feed()
    with LiveStream({"empty": [], "silent": silent}, patience=LONG) as stream:
        stream.remove("silent")
        assert list(stream) == []
        silent.finish()


def test_invalid_calls_are_named_and_change_nothing() -> None:
    feed = Feed()
    with LiveStream({"a": feed, "b": counting(1)}, patience=LONG) as stream:
        feed.push(0)
        with pytest.raises(TaskError, match="there is or was a source 'a'"):
            stream.add("a", counting(1))
        with pytest.raises(TaskError, match="source 'a' has not failed, and not ended"):
            stream.restart("a", counting(1))
        with pytest.raises(TaskError, match="there is no source 'c'"):
            stream.remove("c")
        feed.finish()
        moments = list(stream)
        assert (numbers(moments, "a"), numbers(moments, "b")) == ([0], [0])
        with pytest.raises(TaskError, match="there is or was a source 'b'"):
            stream.add("b", counting(1))
    with pytest.raises(SpclError, match="the stream is closed, so source 'd' cannot be added"):
        stream.add("d", counting(1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sources", [[]]),
        *(("capacity", value) for value in (0, 1.5, math.nan, "4", None)),
        *(("patience", value) for value in (-1, math.nan, math.inf, "1")),
        ("on_failure", None),
    ],
)
def test_arguments_are_validated(name: str, value: Any) -> None:
    with pytest.raises(SpclError, match=rf"^{name} is "):
        LiveStream(**{"sources": {"a": counting(1)}, name: value})


@pytest.mark.parametrize(("source", "advice"), [(5, "a int; give a DataLoader"), (counting, "give what it returns")])
def test_a_source_that_cannot_be_iterated_is_refused_before_any_thread_starts(source: Any, advice: str) -> None:
    threads = threading.active_count()
    with pytest.raises(SpclError, match=advice):
        LiveStream({"a": counting(1), "b": source})
    assert threading.active_count() == threads


def test_iteration_ends_after_patience_and_can_continue() -> None:
    feed = Feed()
    with LiveStream({"slow": feed}, patience=0.01) as stream:
        assert list(stream) == []
        assert stream.running == ("slow",)
        feed.push(1)
        stream.patience = LONG
        assert numbers([next(iter(stream))], "slow") == [1]
        feed.finish()
        assert [moment.ended for moment in stream] == [("slow",)]


def test_keep_open_waits_for_sources_until_closed() -> None:
    taken: queue.SimpleQueue[Moment] = queue.SimpleQueue()
    stream = LiveStream(keep_open=True)
    loop = threading.Thread(target=lambda: [taken.put(moment) for moment in stream])
    loop.start()
    for name in ("a", "b"):
        stream.add(name, counting(1))
        moments = [taken.get(timeout=LONG)]
        while name not in moments[-1].ended:
            moments.append(taken.get(timeout=LONG))
        assert numbers(moments, name) == [0]
    assert loop.is_alive()
    stream.close()
    loop.join(LONG)
    assert not loop.is_alive()


def test_close_stops_threads_waiting_for_capacity() -> None:
    with LiveStream({str(number): counting(10**9) for number in range(5)}, capacity=2) as stream:
        for _, moment in zip(range(20), stream, strict=False):
            assert moment.batches
        threads = list(stream._threads)
    assert len(threads) == 5
    assert not any(thread.is_alive() for thread in threads)
    assert list(stream) == []


def test_close_does_not_wait_for_a_hanging_source() -> None:
    hanging = Feed()
    stream = LiveStream({"hanging": hanging})
    begin = time.monotonic()
    stream.close(timeout=0.01)
    assert time.monotonic() - begin < LONG
    assert list(stream) == []
    hanging.push(0)  # lets its thread exit: see the fixture


def test_source_may_close_the_stream() -> None:
    def last_words() -> Iterator[tuple[Tensor, Tensor]]:
        yield batch(1)
        stream.close()

    stream = LiveStream(patience=LONG, keep_open=True)
    stream.add("a", last_words())
    assert len(list(stream)) <= 1


def test_restored_state_continues_and_removes_ended_sources() -> None:
    with LiveStream({"done": counting(2), "cut": failing_after(3)}, patience=LONG) as stream:
        moments = list(stream)
        state = stream.state_dict()
    assert state == {"step": len(moments), "delivered": {"done": 2, "cut": 3}, "ended": ["done"]}
    new = Feed()
    new.push(0)
    new.finish()
    with LiveStream({"done": counting(2), "cut": counting(1, start=3), "new": new}, patience=LONG) as resumed:
        resumed.load_state_dict(state)
        again = list(resumed)
        assert again[0].step == state["step"]
        assert numbers(again, "done") == []
        assert numbers(again, "cut") == [3]
        assert [name for moment in again for name in moment.started] == ["new"]
        assert sorted(name for moment in again for name in moment.ended) == ["cut", "new"]
        assert resumed.delivered == {"done": 2, "cut": 4, "new": 1}
        assert sorted(resumed.state_dict()["ended"]) == ["cut", "done", "new"]
        with pytest.raises(TaskError, match="there is or was a source 'done'"):
            resumed.add("done", counting(1))


def test_started_task_ends_though_its_source_is_exhausted() -> None:
    with LiveStream({"a": []}, patience=LONG) as stream:
        wait_until(lambda: not any(thread.is_alive() for thread in stream._threads))
        stream.load_state_dict({"step": 5, "delivered": {"a": 3}, "ended": []})
        assert [(moment.step, moment.ended) for moment in stream] == [(5, ("a",))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "text"},
        {"step": -1},
        {"delivered": {"a": None}},
        {"delivered": ["a"]},
        {"ended": "a"},
        {"ended": [7]},
        {"positions": {"a": 7}},
        {"ends": None},
    ],
)
def test_a_state_of_wrong_content_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    with LiveStream({"a": counting(2)}, patience=LONG) as stream:
        before = stream.state_dict()
        (name,) = wrong
        with pytest.raises(CheckpointError, match=f"{name} of the stream is .* in the checkpoint, not"):
            stream.load_state_dict({"step": 5, "delivered": {"a": 3}, "ended": []} | wrong)
        assert stream.state_dict() == before
        assert numbers(list(stream), "a") == [0, 1]


def test_started_task_may_be_added_after_loading() -> None:
    with LiveStream(patience=LONG) as stream:
        stream.load_state_dict({"step": 5, "delivered": {"a": 3}, "ended": []})
        stream.add("a", counting(1, start=3))
        moments = list(stream)
    assert numbers(moments, "a") == [3]
    assert [name for moment in moments for name in moment.started] == []
    assert moments[-1].ended == ("a",)


class RandomLife(RuleBasedStateMachine):
    """Random sequences of adding, feeding, failing, restarting, finishing and removing sources, against a model."""

    @initialize(capacity=st.integers(1, 3))
    def open(self, capacity: int) -> None:
        self.stream = LiveStream(capacity=capacity, patience=LONG, keep_open=True, on_failure=lambda *_: None)
        self.feeds: dict[str, Feed] = {}
        self.sent: dict[str, list[int]] = {}
        self.received: dict[str, list[int]] = {}
        self.alive: set[str] = set()
        self.finishing: set[str] = set()
        self.started: list[str] = []
        self.ended: list[str] = []

    @rule()
    def add(self) -> None:
        name = f"source {len(self.sent)}"
        self.feeds[name], self.sent[name], self.received[name] = Feed(), [], []
        self.alive.add(name)
        self.stream.add(name, self.feeds[name])

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), count=st.integers(1, 5))
    def push(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        for _ in range(count):
            self.sent[name].append(len(self.sent[name]))
            self.feeds[name].push(self.sent[name][-1])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fail_and_restart(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.feeds[name].fail()
        while name not in self.stream.failed:
            self.take()
        self.feeds[name] = Feed()
        self.stream.restart(name, self.feeds[name])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.feeds[name].finish()
        self.alive.remove(name)
        if self.sent[name]:
            self.finishing.add(name)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.stream.remove(name)
        self.feeds[name].finish()
        self.alive.remove(name)
        if self.received[name]:
            self.finishing.add(name)
        self.sent[name] = list(self.received[name])

    @rule()
    def take(self) -> None:
        if self.received == self.sent and not self.finishing:  # no precondition: it depends on the threads' timing
            return
        moment = next(iter(self.stream))
        assert moment.batches or moment.ended
        assert set(moment.started) <= set(moment.batches)
        for name, (x, _) in moment.batches.items():
            assert (name in moment.started) == (not self.received[name])
            assert name not in self.ended
            self.received[name].append(int(x))
            assert self.received[name] == self.sent[name][: len(self.received[name])]
        self.started.extend(moment.started)
        self.ended.extend(moment.ended)
        for name in moment.ended:
            assert self.received[name] == self.sent[name]
            self.finishing.remove(name)

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        for name in sorted(self.alive):
            self.feeds[name].finish()
            self.finishing.update([name] if self.sent[name] else [])
        while self.received != self.sent or self.finishing:
            self.take()
        self.stream.close(LONG)
        assert not any(thread.is_alive() for thread in self.stream._threads)
        assert sorted(self.started) == sorted(self.ended) == sorted(name for name in self.sent if self.received[name])
        delivered = {name: len(received) for name, received in self.received.items() if received}
        assert self.stream.delivered == delivered
        assert self.stream.state_dict()["delivered"] == delivered


TestRandomLife = RandomLife.TestCase
TestRandomLife.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


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
