"""Replay memories: what is kept, drawn and saved, and draws that are made ahead and undone."""

import json
import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from _learning import EVENTS, PlainMoment, TinyResNet, assert_same, complete_state, heads, live_one_event
from cuda_sync import synchronization_forbidden
from spcl.batches import Inputs
from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.errors import CheckpointError, SpclError, TaskError
from spcl.learner import Learner
from spcl.memory import MEMORIES, BalancedCoreset, EpochCoreset, Memory, ReplayBatch, Reservoir, SourceBuffer
from spcl.memory.base import draw_ahead
from spcl.methods import make_method

POLICIES = [BalancedCoreset, Reservoir]
both = pytest.mark.parametrize("policy", POLICIES)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def numbered(first: int, count: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return distinguishable samples: x holds their number, the label is the number modulo the classes."""
    numbers = torch.arange(first, first + count)
    return numbers[:, None].repeat(1, 2), numbers % classes


def numbers(batches: list[ReplayBatch]) -> list[int]:
    return [int(number) for batch in batches for number in batch.x[:, 0]]


def fill(memory: Memory, tasks: dict[str, int], *, batches: int = 4, size: int = 12) -> None:
    for task, classes in tasks.items():
        memory.start(task, classes)
    for batch in range(batches):
        for task, classes in tasks.items():
            memory.observe(task, *numbered(batch * size, size, classes))


def drawn(memory: Memory, count: int = 10_000) -> dict[str, list[int]]:
    return {batch.source: numbers([batch]) for batch in memory.draw(count)}


# Which samples are kept


def dealt(budget: int, classes: int) -> list[int]:
    """Return the equal shares of the classes, computed sample by sample."""
    return [len(range(first, budget, classes)) for first in range(classes)]


def test_coreset_is_empty_until_a_task_finishes_then_balanced() -> None:
    memory = BalancedCoreset(23)
    fill(memory, {"a": 2, "b": 3, "c": 1})
    assert (memory.draw(5), len(memory), memory.counts()) == ([], 0, {})
    memory.finish("b")
    assert memory.counts() == {"b": dealt(23, 3)}
    memory.finish("a")
    assert memory.counts() == {"a": dealt(23, 5)[:2], "b": dealt(23, 5)[2:]}
    memory.finish("c")
    assert memory.counts() == {"a": dealt(23, 6)[:2], "b": dealt(23, 6)[2:5], "c": dealt(23, 6)[5:]}
    assert len(memory) == 23


def test_unused_shares_stay_empty() -> None:
    memory = BalancedCoreset(10)
    memory.start("a", 2)
    memory.observe("a", torch.zeros(21, 1), torch.tensor([0] * 20 + [1]))
    memory.finish("a")
    assert memory.counts() == {"a": [5, 1]}


def test_more_classes_than_budget() -> None:
    memory = BalancedCoreset(3)
    fill(memory, {"a": 2, "b": 4})
    memory.finish("a")
    memory.finish("b", lambda x: x.float())
    assert memory.counts() == {"a": [1, 1], "b": [1, 0, 0, 0]}


def test_task_without_samples_can_finish() -> None:
    memory = BalancedCoreset(4)
    memory.start("a", 2)
    memory.finish("a", lambda x: x.float())
    assert (memory.draw(4), memory.counts(), memory.nbytes) == ([], {"a": [0, 0]}, 0)


def test_reservoir_fills_to_its_budget() -> None:
    memory = Reservoir(20)
    memory.start("a", 3)
    memory.observe("a", *numbered(0, 12, 3))
    assert sorted(drawn(memory)["a"]) == list(range(12))
    memory.observe("a", *numbered(12, 30, 3))
    memory.finish("a")
    assert len(set(drawn(memory)["a"])) == len(memory) == 20


def assert_uniform(hits: NDArray[np.int64], trials: int, kept: int) -> None:
    """Test by chi-square, corrected for drawing ``kept`` without replacement, that samples were kept equally often."""
    n, p = len(hits), kept / len(hits)
    assert hits.sum() == trials * kept
    statistic = ((hits - trials * p) ** 2).sum() / (trials * p * (1 - p)) * (n - 1) / n
    assert 0.001 < stats.chi2.cdf(statistic, n - 1) < 0.999


def test_coreset_is_a_uniform_sample_of_each_class() -> None:
    hits, trials = np.zeros(30, dtype=np.int64), 600
    for seed in range(trials):
        memory = BalancedCoreset(12, seed=seed)
        fill(memory, {"a": 1, "b": 1}, batches=5, size=6)
        memory.finish("b")
        memory.observe("a", *numbered(30, 6, 1))
        memory.finish("a")
        hits[drawn(memory)["b"]] += 1
    assert_uniform(hits, trials, kept=6)


def test_reservoir_is_a_uniform_sample_of_all_tasks() -> None:
    hits, trials = np.zeros(40, dtype=np.int64), 600
    for seed in range(trials):
        memory = Reservoir(10, seed=seed)
        memory.start("a", 1)
        memory.start("b", 1)
        for first, task in enumerate("abbab"):
            memory.observe(task, *numbered(first * 8, 8, 1))
        hits[numbers(memory.draw(10))] += 1
    assert_uniform(hits, trials, kept=10)


@pytest.mark.parametrize("policy", [*POLICIES, EpochCoreset])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_memory_that_is_made_smaller_holds_what_a_smaller_one_would(policy: type[Memory], is_loaded: bool) -> None:
    large, small = policy(40, seed=3), policy(11, seed=3)
    for memory in (large, small):
        fill(memory, {"a": 2, "b": 3, "c": 2})
        for task in ("a", "b"):
            memory.finish(task)
    if is_loaded:
        saved = large.state_dict()
        large = policy(40)
        large.load_state_dict(saved)
    large.resize(11)
    assert {task: set(drawn(large)[task]) for task in drawn(large)} == {
        task: set(drawn(small)[task]) for task in drawn(small)
    }
    large.resize(40)
    large.observe("c", *numbered(100, 12, 2))
    large.finish("c")
    assert 11 < len(large) <= 40
    assert len(large.draw(100)) == len(large.replayable_sources())


@both
def test_draws_are_uniform(policy: type[Memory]) -> None:
    memory = policy(24)
    memory.start("a", 2)
    memory.start("b", 1)
    memory.observe("a", *numbered(0, 16, 2))
    memory.observe("b", *numbered(16, 8, 1))
    memory.finish("a")
    memory.finish("b")
    hits, trials = np.zeros(24, dtype=np.int64), 600
    for _ in range(trials):
        hits[numbers(memory.draw(7))] += 1
    assert_uniform(hits, trials, kept=7)


class Newest(Reservoir):
    def rank(self, arrivals: NDArray[np.int64]) -> NDArray[np.float64]:
        return -arrivals.astype(float)


@given(sizes=st.lists(st.integers(1, 15), min_size=1, max_size=8), budget=st.integers(1, 30))
def test_custom_policy_by_rank(sizes: list[int], budget: int) -> None:
    memory = Newest(budget)
    memory.start("a", 3)
    first = 0
    for size in sizes:
        memory.observe("a", *numbered(first, size, 3))
        first += size
        assert sorted(drawn(memory)["a"]) == list(range(max(0, first - budget), first))


class KeepsAll(Memory):
    def choose(self) -> dict[str, NDArray[np.bool_]]:
        return {}


class KeepsAllFinished(KeepsAll):
    def replayable(self, buffer: SourceBuffer) -> bool:
        return not buffer.running


def test_policy_exceeding_the_budget_is_an_error() -> None:
    memory = KeepsAll(10)
    fill(memory, {"a": 2, "b": 2}, batches=1, size=5)
    with pytest.raises(SpclError, match=r"KeepsAll\.choose left 11 replayable samples in a memory of 10"):
        memory.observe("b", *numbered(0, 1, 2))
    later = KeepsAllFinished(10)
    fill(later, {"a": 2}, batches=1, size=11)
    with pytest.raises(SpclError, match=r"KeepsAllFinished\.choose left 11 replayable samples in a memory of 10"):
        later.finish("a")


# Random sequences of calls, against a model in plain Python


class Life(RuleBasedStateMachine):
    policy: type[Memory]

    @initialize(budget=st.integers(1, 25), seed=st.integers(0, 99))
    def build(self, budget: int, seed: int) -> None:
        self.memory = self.policy(budget, seed=seed)
        self.classes: dict[str, int | None] = {}
        self.running: set[str] = set()
        self.seen: dict[str, dict[int, float]] = {}
        self.described: dict[int, float] = {}
        self.count = 0

    @rule(classes=st.none() | st.integers(1, 4))
    def start(self, classes: int | None) -> None:
        task = f"task {len(self.classes)}"
        self.memory.start(task, classes)
        self.classes[task], self.seen[task] = classes, {}
        self.running.add(task)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(1, 20), with_logits=st.booleans())
    def observe(self, data: st.DataObject, size: int, with_logits: bool) -> None:
        task = data.draw(st.sampled_from(sorted(self.running)))
        x = torch.arange(self.count, self.count + size, dtype=torch.int32)[:, None]
        classes = self.classes[task]
        y = x[:, 0] / 2 if classes is None else x[:, 0].long() ** 2 % classes
        width = data.draw(st.integers(1, 3))
        self.memory.observe(task, x, y, x.float().repeat(1, width) if with_logits else None)
        for number, target in zip(x[:, 0].tolist(), y.tolist(), strict=True):
            self.seen[task][number] = target
            if with_logits and self.policy is Reservoir:
                self.described[number] = float(number)
        self.count += size

    @precondition(lambda self: self.running)
    @rule(data=st.data(), describe=st.booleans())
    def finish(self, data: st.DataObject, describe: bool) -> None:
        task = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(task)
        self.memory.finish(task, (lambda x: -x.float()) if describe else None)
        if describe and self.policy is BalancedCoreset:
            self.described |= {number: -float(number) for number in self.seen[task]}

    @rule()
    def reload(self) -> None:
        state = self.memory.state_dict()
        self.memory = self.policy(self.memory.budget, seed=12345)
        self.memory.load_state_dict(state)

    @rule(count=st.integers(1, 30))
    def draw(self, count: int) -> None:
        batches = self.memory.draw(count)
        tasks = [batch.source for batch in batches]
        assert tasks == [task for task in self.classes if task in tasks]
        found = numbers(batches)
        assert len(found) == len(set(found)) == min(count, len(self.memory))
        for batch in batches:
            self.check(batch)

    def check(self, batch: ReplayBatch) -> None:
        assert batch.x.dtype == torch.int32
        for row, number in enumerate(batch.x[:, 0].tolist()):
            assert batch.y[row].item() == self.seen[batch.source][number]
            logits = [] if batch.logits is None else batch.logits[row].tolist()
            known = {value for value in logits if not math.isnan(value)}
            assert known == ({self.described[number]} if number in self.described else set())

    @invariant()
    def balanced(self) -> None:
        if self.policy is not BalancedCoreset:
            return
        for task in self.classes:
            members = [name for name in self.classes if name == task or name not in self.running]
            shares = dealt(self.memory.budget, sum(self.classes[name] or 1 for name in members))
            first = sum(self.classes[name] or 1 for name in members[: members.index(task)])
            targets = [0 if self.classes[task] is None else target for target in self.seen[task].values()]
            expected = [min(shares[first + label], targets.count(label)) for label in range(self.classes[task] or 1)]
            buffer = self.memory.buffers[task]
            assert np.bincount(buffer.labels, minlength=buffer.classes).tolist() == expected
            assert self.memory.counts().get(task, expected) == expected

    @invariant()
    def within_budget(self) -> None:
        assert len(self.memory) <= self.memory.budget
        assert len(self.memory) == sum(map(sum, self.memory.counts().values()))
        if self.policy is Reservoir:
            assert len(self.memory) == min(self.memory.budget, self.count)
        stored = [buffer.state_dict()["fields"].values() for buffer in self.memory.buffers.values()]
        assert self.memory.nbytes == sum(field.numel() * field.element_size() for fields in stored for field in fields)


class CoresetLife(Life):
    policy = BalancedCoreset


class ReservoirLife(Life):
    policy = Reservoir


LIFE = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestCoresetLife = CoresetLife.TestCase
TestCoresetLife.settings = LIFE
TestReservoirLife = ReservoirLife.TestCase
TestReservoirLife.settings = LIFE


# Reproducibility and resuming


@both
def test_same_seed_gives_same_memory_and_draws(policy: type[Memory]) -> None:
    def life(seed: int) -> list[dict[str, list[int]]]:
        memory = policy(15, seed=seed)
        fill(memory, {"a": 2, "b": 3})
        memory.finish("a")
        memory.finish("b")
        return [drawn(memory, 6) for _ in range(3)]

    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1), np.random.random()
    torch.manual_seed(0)
    np.random.seed(0)
    assert life(1) == life(1) != life(2)
    assert (torch.rand(1), np.random.random()) == expected, "the global generators were used"


@both
def test_restored_memory_continues_identically(policy: type[Memory], tmp_path: Path) -> None:
    def begin(memory: Memory) -> Memory:
        fill(memory, {"a": 2, "b": 3})
        memory.finish("a", lambda x: x.float())
        memory.draw(3)
        return memory

    def go_on(memory: Memory) -> tuple[Any, ...]:
        memory.observe("b", *numbered(48, 12, 3))
        memory.finish("b")
        batches = [batch for _ in range(3) for batch in memory.draw(7)]
        found = [(r.source, r.x.tolist(), r.y.tolist(), r.slots.tolist(), str(r.logits)) for r in batches]
        return found, memory.nbytes, memory.seen

    write_checkpoint(tmp_path / "c", begin(policy(15)).state_dict())
    resumed = policy(15, seed=7)
    resumed.load_state_dict(read_checkpoint(tmp_path / "c"))
    assert go_on(resumed) == go_on(begin(policy(15)))


def test_loaded_memory_shares_no_storage() -> None:
    memory, copy = Reservoir(10), Reservoir(10)
    fill(memory, {"a": 1}, batches=1, size=5)
    copy.load_state_dict(memory.state_dict())
    [batch] = memory.draw(5)
    memory.replace(batch, torch.full_like(batch.x, -1))
    assert sorted(drawn(copy)["a"]) == list(range(5))


def test_state_of_another_policy_or_budget_is_refused() -> None:
    with pytest.raises(CheckpointError, match="saved memory is a Reservoir of 10 samples, this one a Reservoir of 9"):
        Reservoir(9).load_state_dict(Reservoir(10).state_dict())
    with pytest.raises(CheckpointError, match="this one a BalancedCoreset of 10"):
        BalancedCoreset(10).load_state_dict(Reservoir(10).state_dict())


def test_generator_state_is_plain_data() -> None:
    state = Reservoir(1, seed=3).state_dict()["generator"]
    assert json.loads(json.dumps(state)) == state


# Fields


@both
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.bool])
def test_samples_keep_their_dtype(policy: type[Memory], dtype: torch.dtype) -> None:
    memory = policy(4)
    memory.start("a", None)
    memory.observe("a", torch.ones(9, 3, 2, dtype=dtype), torch.ones(9, 5, dtype=torch.float64))
    memory.finish("a")
    [batch] = memory.draw(4)
    assert (batch.x.dtype, batch.x.shape) == (dtype, (4, 3, 2))
    assert (batch.y.dtype, batch.y.shape) == (torch.float64, (4, 5))
    assert batch.logits is None
    assert memory.nbytes == 4 * (6 * dtype.itemsize + 5 * 8)


def test_tasks_may_have_different_shapes_and_targets() -> None:
    memory = Reservoir(100)
    memory.start("image", 2)
    memory.start("signal", None)
    memory.observe("image", torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]))
    memory.observe("signal", torch.zeros(6, 20), torch.zeros(6, 2))
    assert [(r.source, tuple(r.x.shape), tuple(r.y.shape)) for r in memory.draw(50)] == [
        ("image", (4, 3, 8, 8), (4,)),
        ("signal", (6, 20), (6, 2)),
    ]


def test_coreset_stores_logits_when_a_task_finishes() -> None:
    asked: list[int] = []

    def model(x: Tensor) -> Tensor:
        asked.append(len(x))
        assert not torch.is_grad_enabled()
        return torch.stack([x[:, 0].float(), -x[:, 0].float()], dim=1)

    memory = BalancedCoreset(600)
    fill(memory, {"a": 2, "b": 2}, batches=2, size=400)
    memory.finish("a", model)
    assert sum(asked) == 600
    assert max(asked) <= 256
    memory.finish("b")
    first, second = memory.draw(600)
    assert first.logits is not None
    assert torch.equal(first.logits, torch.stack([first.x[:, 0].float(), -first.x[:, 0].float()], dim=1))
    assert second.logits is None


@pytest.mark.parametrize("policy", [BalancedCoreset, EpochCoreset])
def test_a_task_whose_logits_cannot_be_stored_runs_on(policy: type[Memory]) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    memory = policy(20, seed=0)
    fill(memory, {"a": 2, "b": 2}, batches=2, size=40)
    memory.finish("a", lambda x: x.float())
    memory.draw(4)
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.finish("b", broken)
    assert {part.source for part in memory.draw(20)} == {"a"}
    memory.observe("b", *numbered(1000, 40, 2))
    memory.finish("b", lambda x: x.float())
    assert memory.counts() == {"a": [5, 5], "b": [5, 5]}
    for part in memory.draw(20):
        assert part.logits is not None
        assert torch.equal(part.logits, part.x.float())


def test_logits_of_later_classes_are_nan() -> None:
    memory = Reservoir(100)
    memory.start("a", 1)
    for first, width in (0, None), (10, 2), (20, 4), (30, 3), (40, None):
        x, y = numbered(first, 10, 1)
        logits = None if width is None else x[:, :1].float().repeat(1, width).requires_grad_()
        memory.observe("a", x, y, logits)
    [batch] = memory.draw(100)
    assert batch.logits is not None
    assert not batch.logits.requires_grad
    known = {0: 0, 1: 2, 2: 4, 3: 3, 4: 0}
    for number, row in zip(numbers([batch]), batch.logits, strict=True):
        width = known[number // 10]
        assert row[:width].tolist() == [float(number)] * width
        assert row[width:].isnan().all()
    assert memory.nbytes == 50 * (2 * 8 + 8 + 4 * 4)


@pytest.mark.parametrize("policy", [Reservoir, BalancedCoreset])
def test_planned_batches_of_one_task_are_all_stored(policy: type[Memory]) -> None:
    at_once, planned = policy(20, seed=0), policy(20, seed=0)
    for memory in (at_once, planned):
        memory.start("a", classes=2)
        if memory is planned:
            memory.begin()
        for first in (1, 101):
            memory.observe("a", torch.arange(first, first + 6), torch.arange(6) % 2)
        memory.commit()
        memory.finish("a")
    assert sorted(planned.draw(20)[0].x.tolist()) == [*range(1, 7), *range(101, 107)]
    assert torch.equal(planned.draw(20)[0].x, at_once.draw(20)[0].x)


def test_replaced_inputs_are_stored_and_counted() -> None:
    memory, resumed = Reservoir(40, dtype=torch.float32), Reservoir(40, dtype=torch.float32)
    fill(memory, {"a": 2, "b": 2}, batches=1, size=20)
    before = {task: set(found) for task, found in drawn(memory).items()}
    edited: dict[str, set[int]] = {}
    for batch in memory.draw(9):
        memory.replace(batch, -1000 - batch.x)
        edited[batch.source] = set(numbers([batch]))
    after = {task: set(found) for task, found in drawn(memory).items()}
    assert after == {task: before[task] - edited[task] | {-1000 - n for n in edited[task]} for task in before}
    memory.observe("a", *numbered(100, 50, 2))  # evicts some and moves others
    resumed.load_state_dict(memory.state_dict())
    for batch in memory.draw(40) + resumed.draw(40):
        assert torch.equal(batch.edits, (batch.x[:, 0] < 0).long())


def test_storage_shrinks_with_the_shares() -> None:
    memory = BalancedCoreset(100)
    fill(memory, {f"task {number}": 1 for number in range(10)}, batches=10)
    for task in list(memory.buffers):
        memory.finish(task)
    held = sum(
        field.untyped_storage().nbytes() for buffer in memory.buffers.values() for field in buffer.fields.values()
    )
    assert memory.nbytes == 100 * 3 * 8
    assert held <= 2 * memory.nbytes


def test_memory_copies_observed_and_drawn_samples() -> None:
    memory = Reservoir(10)
    memory.start("a", 1)
    x, y = numbered(0, 5, 1)
    memory.observe("a", x, y)
    x.fill_(-1)
    memory.draw(5)[0].x.fill_(-1)
    assert sorted(drawn(memory)["a"]) == list(range(5))


@needs_cuda
@both
def test_samples_stay_on_their_device_without_synchronizing(policy: type[Memory]) -> None:
    memory = policy(8)
    memory.start("a", 2)
    x, y = torch.randn(10, 3, device="cuda"), torch.arange(10) % 2
    logits = torch.randn(10, 2, device="cuda")
    with synchronization_forbidden():
        for _ in range(5):
            memory.observe("a", x, y, logits)
        memory.observe("a", x, y)
        memory.finish("a", lambda x: x[:, :2])
        [batch] = memory.draw(4)
        memory.replace(batch, batch.x + 1)
    assert (batch.x.device.type, batch.y.device.type) == ("cuda", "cpu")
    assert batch.logits is not None
    assert batch.logits.device.type == "cuda"


@needs_cuda
@both
@pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_samples_are_stored_on_the_chosen_device(policy: type[Memory], source: str, target: str) -> None:
    memory, resumed = policy(9, device=target), policy(9, device=source)
    memory.start("a", 3)
    x, y = (tensor.to(source) for tensor in numbered(0, 30, 3))
    memory.observe("a", x, y, x.float())
    memory.finish("a", lambda x: x.float())
    resumed.load_state_dict(memory.state_dict())
    for one, device in (memory, target), (resumed, source):
        [batch] = one.draw(9)
        assert batch.logits is not None
        assert {t.device.type for t in (batch.x, batch.logits)} == {device}
        assert torch.equal(batch.x[:, 0].cpu() % 3, batch.y)  # targets stay on the host
        assert torch.equal(batch.x.float(), batch.logits)


# Errors


def started() -> Reservoir:
    memory = Reservoir(10)
    fill(memory, {"a": 3}, batches=1, size=5)
    memory.start("signal", None)
    memory.start("done", 2)
    memory.finish("done")
    return memory


LABELS = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.start("a", 2), "already holds a source 'a'"),
        (lambda m: m.start("new", 0), "source 'new' has 0 classes"),
        (lambda m: m.finish("new"), "has no source 'new' .*a, signal, done"),
        (lambda m: m.finish("done"), "source 'done' is finished"),
        (lambda m: m.observe("done", torch.zeros(1, 2), torch.zeros(1)), "source 'done' is finished"),
        (
            lambda m: m.check("a", torch.zeros(4, 3), LABELS),
            r"source 'a': x \(float32\[3\]\) does not fit the memory's \(int64\[2\]\)",
        ),
        (
            lambda m: m.check("a", torch.zeros(4, 2), LABELS),
            r"source 'a': x .*float32\[2\]\) does not fit .*int64",
        ),
        (lambda m: m.check("a", torch.zeros(4, 2).long(), LABELS.int()), r"source 'a': y .*int32\[\]\) does not fit"),
        (
            lambda m: m.check("a", torch.zeros(3, 2).long(), LABELS),
            r"source 'a': x .*\[3, 2\].* y .*\[4\].* same number",
        ),
        (lambda m: m.check("a", torch.zeros(0, 2).long(), LABELS[:0]), "source 'a': .* at least 1"),
        (lambda m: m.check("signal", torch.tensor(1.0), torch.tensor(1.0)), "source 'signal': x"),
        (
            lambda m: m.check("a", torch.zeros(4, 2).long(), LABELS + 3),
            "source 'a' has classes 0 to 2, but the batch has label 3",
        ),
        (
            lambda m: m.check("a", torch.zeros(4, 2).long(), LABELS - 1),
            "source 'a' has classes 0 to 2, but the batch has label -1",
        ),
        (lambda m: m.observe("a", *numbered(0, 4, 3), torch.zeros(3, 2)), "source 'a': 3 logits for 4 samples"),
        (
            lambda m: m.replace(m.draw(2)[0], torch.zeros(2, 2)),
            "source 'a': edited x .* build the memory with the dtype",
        ),
        (lambda m: m.replace(m.draw(2)[0], torch.zeros(1, 2).long()), "source 'a': edited x"),
    ],
)
def test_invalid_calls_name_the_task_and_change_nothing(call: Callable[[Memory], None], words: str) -> None:
    memory = started()
    before = str({**memory.state_dict(), "generator": None})
    with pytest.raises(TaskError, match=words):
        call(memory)
    assert str({**memory.state_dict(), "generator": None}) == before


def test_labels_must_be_integers() -> None:
    memory = Reservoir(10)
    memory.start("a", 2)
    with pytest.raises(TaskError, match=r"source 'a': class labels must be .* torch.float32 of shape \(4,\)"):
        memory.check("a", torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(TaskError, match=r"source 'a': class labels must be .* torch.int64 of shape \(4, 1\)"):
        memory.check("a", torch.zeros(4, 2), LABELS[:, None])


@both
def test_memory_needs_a_budget(policy: type[Memory]) -> None:
    with pytest.raises(SpclError, match="is 0; give a budget of at least 1 sample"):
        policy(0)


ALL_POLICIES = [policy for policy in MEMORIES.values() if policy.__module__.startswith("spcl.memory.")]
TASKS = ("a", "b", "c")

observe = st.tuples(st.just("observe"), st.sampled_from(TASKS), st.integers(1, 9))
finish = st.tuples(st.just("finish"), st.sampled_from(TASKS), st.just(0))
draw = st.tuples(st.just("draw"), st.just(""), st.integers(1, 6))
replace = st.tuples(st.just("replace"), st.just(""), st.integers(1, 6))
lives = st.lists(observe | finish | draw | replace, max_size=25)
Event = tuple[str, str, int]


class DrawnLife:
    """A memory and what happens to it; samples are numbered, so that no two are the same."""

    def __init__(self, policy: type[Memory], seed: int) -> None:
        self.memory = policy(11, seed=seed, dtype=torch.float32)
        self.samples = 0
        for task in TASKS:
            self.memory.start(task, classes=2)

    def live(self, event: Event) -> object:
        what, task, number = event
        buffer = self.memory.buffers.get(task)
        if what == "observe" and buffer is not None and buffer.running:
            x = torch.arange(self.samples, self.samples + number)
            self.samples += number
            self.memory.observe(task, x[:, None].float(), x % 2, x[:, None].repeat(1, 1 + number % 3) * 10.0)
        elif what == "finish" and buffer is not None and buffer.running:
            self.memory.finish(task, lambda x: -x)
        elif what == "draw":
            return [content(batch) for batch in self.memory.draw(number)]
        elif what == "replace":
            for batch in self.memory.draw(number):
                self.memory.replace(batch, batch.x + 0.25)
        return None


def content(batch: ReplayBatch) -> tuple[str, ...]:
    return tuple(map(str, (batch.source, batch.x, batch.y, batch.logits, batch.slots, batch.edits)))


def state_of(memory: Memory) -> str:
    state: dict[str, Any] = memory.state_dict()
    return str(state) + str(memory.nbytes)


@pytest.mark.parametrize("policy", ALL_POLICIES)
@given(life=lives, ahead=st.lists(st.integers(0, 6), min_size=25, max_size=25), seed=st.integers(0, 9))
def test_draws_made_ahead_change_nothing(policy: type[Memory], life: list[Event], ahead: list[int], seed: int) -> None:
    one, other = DrawnLife(policy, seed), DrawnLife(policy, seed)
    for event, count in zip(life, ahead, strict=False):
        for _ in range(count % 3):
            draw_ahead(other.memory, count)
        assert one.live(event) == other.live(event)
    assert state_of(one.memory) == state_of(other.memory)


@pytest.mark.parametrize("policy", ALL_POLICIES)
@given(before=lives, undone=lives, after=lives, seed=st.integers(0, 9))
def test_what_is_undone_leaves_no_trace(
    policy: type[Memory], before: list[Event], undone: list[Event], after: list[Event], seed: int
) -> None:
    steps = [event for event in undone if event[0] != "finish"]  # tasks end between steps
    one, other = DrawnLife(policy, seed), DrawnLife(policy, seed)
    for event in before:
        assert one.live(event) == other.live(event)
    other.memory.begin()
    for _ in range(2):
        for event in steps:
            other.live(event)
            draw_ahead(other.memory, 2)
        other.memory.rollback()
        assert state_of(one.memory) == state_of(other.memory)
    other.memory.commit()
    other.samples = one.samples
    for event in after:
        assert one.live(event) == other.live(event)
    assert state_of(one.memory) == state_of(other.memory)


def test_draws_that_are_not_undone_are_followed_by_others() -> None:
    memory = Reservoir(30, seed=1)
    memory.start("a", None)
    memory.observe("a", torch.arange(30), torch.arange(30))
    memory.begin()
    first = memory.draw(5)[0].x
    draw_ahead(memory, 5)
    memory.rollback(draws=False)
    second = memory.draw(5)[0].x
    memory.rollback()
    assert first.tolist() != second.tolist()
    assert memory.draw(5)[0].x.tolist() == first.tolist()


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_task_that_would_finish_within_a_step_is_refused(policy: type[Memory]) -> None:
    torch.manual_seed(0)
    learner = Learner(torch.nn.Linear(3, 4), make_method("er"), memory=policy(8, seed=0))
    batches = {}
    for task in TASKS:
        learner.add_task(task, classes=2)
        batches[task] = torch.randn(6, 3), torch.arange(6) % 2
        learner.step(batches)
    learner.finish_task("a")
    del batches["a"]
    before = complete_state(learner)
    with pytest.raises(SpclError, match="finish_task was called within a call of step; call it when step has returned"):
        learner.fit([PlainMoment(batches)], meanwhile=lambda: learner.finish_task("b"))
    assert_same(before, complete_state(learner))
    learner.step(batches)
    learner.finish_task("b")
    assert len(learner.memory) <= 8


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_checkpoint_is_enough_to_make_a_policy_again(policy: type[Memory], tmp_path: Path) -> None:
    learner = Learner(torch.nn.Linear(3, 4), make_method("er"), memory=policy(8, seed=3, dtype=torch.float64))
    learner.add_task("a", classes=2)
    learner.step({"a": (torch.randn(6, 3), torch.arange(6) % 2)})
    learner.save(tmp_path / "c")
    loaded = Learner.load(tmp_path / "c", backbone=torch.nn.Linear(3, 4))
    assert type(loaded.memory) is policy
    assert state_of(loaded.memory) == state_of(learner.memory)
    known = {
        "budget",
        "seed",
        "device",
        "dtype",
        "share",
    }  # other options would be lost: a checkpoint does not hold them
    assert signature(policy).parameters.keys() <= known


def test_samples_that_were_undone_do_not_tell_of_which_kind_others_are() -> None:
    memory = Reservoir(8)
    memory.start("a", None)
    memory.begin()
    for _ in range(2):
        memory.observe("a", torch.ones(2, 3), torch.zeros(2))
    memory.rollback()
    memory.commit()
    memory.observe("a", torch.ones(2, 3, dtype=torch.uint8), torch.zeros(2))
    with pytest.raises(TaskError, match=r"x .*float32.* does not fit the memory's .*uint8"):
        memory.observe("a", torch.ones(2, 3), torch.zeros(2))


def test_a_sample_stays_in_its_row_and_evicted_rows_are_used_again() -> None:
    memory = Reservoir(20, seed=0)
    memory.start("a", None)
    buffer = memory.buffers["a"]
    for step in range(40):
        before = dict(zip(map(int, buffer.take("x")), buffer.rows.tolist(), strict=True)) if buffer.fields else {}
        memory.begin()
        memory.observe("a", torch.arange(10 * step, 10 * step + 10), torch.arange(10))
        memory.commit()
        after = dict(zip(map(int, buffer.take("x")), buffer.rows.tolist(), strict=True))
        assert all(before[number] == after[number] for number in before.keys() & after.keys())
        assert len(set(buffer.rows.tolist())) == buffer.size
    assert len(buffer.fields["x"]) <= (20 + 10) * 5 // 4


def test_undone_samples_are_not_overwritten_by_many_new_ones() -> None:
    memory = BalancedCoreset(12, seed=0)
    memory.start("a", 3)
    memory.observe("a", torch.arange(60), torch.arange(60) % 3)
    before, rows = memory.buffers["a"].take("x"), memory.buffers["a"].rows
    memory.begin()
    for first in range(100, 1000, 100):
        memory.observe("a", torch.arange(first, first + 100), torch.arange(100) % 3)
    assert not torch.equal(memory.buffers["a"].take("x"), before)
    memory.rollback()
    assert torch.equal(memory.buffers["a"].take("x"), before)
    assert np.array_equal(memory.buffers["a"].rows, rows)


def test_wider_logits_are_undone() -> None:
    memory = Reservoir(8, seed=0)
    memory.start("a", 4)
    for first in (0, 10):  # the second batch finds free rows for the third
        memory.observe("a", torch.arange(first, first + 8), torch.zeros(8, dtype=torch.long), torch.ones(8, 2))
    before = memory.buffers["a"].take("logits")
    memory.begin()
    memory.observe("a", torch.arange(2), torch.zeros(2, dtype=torch.long), torch.ones(2, 4))
    assert memory.buffers["a"].fields["logits"].shape[1] == 4
    memory.rollback()
    assert torch.equal(memory.buffers["a"].take("logits"), before)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_edited_samples_are_drawn_though_others_were_drawn_ahead(policy: type[Memory]) -> None:
    life = DrawnLife(policy, 0)
    life.live(("observe", "a", 9))
    life.live(("finish", "a", 0))
    (batch,) = life.memory.draw(9)
    draw_ahead(life.memory, 9)
    life.memory.replace(batch, batch.x + 0.25)
    assert all(float(x) % 1 == 0.25 for x in life.memory.draw(9)[0].x)


def test_loading_forgets_what_was_drawn_ahead_and_begun() -> None:
    life, other = DrawnLife(Reservoir, 0), DrawnLife(Reservoir, 0)
    life.live(("observe", "a", 9))
    before = state_of(life.memory)
    saved = life.memory.state_dict()
    life.live(("observe", "b", 9))
    life.memory.begin()
    draw_ahead(life.memory, 4)
    life.memory.load_state_dict(saved)
    life.memory.rollback()
    assert state_of(life.memory) == before
    other.memory.load_state_dict(saved)
    assert life.live(("draw", "", 4)) == other.live(("draw", "", 4))


def test_what_is_committed_is_not_undone() -> None:
    life = DrawnLife(Reservoir, 0)
    life.memory.begin()
    life.live(("observe", "a", 9))
    life.memory.commit()
    before = state_of(life.memory)
    life.memory.rollback()
    assert state_of(life.memory) == before
    assert life.memory.draw(0) == []


def test_want_of_memory_loses_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    life = DrawnLife(Reservoir, 0)
    life.live(("observe", "a", 4))
    before, calls = state_of(life.memory), []

    def fail(*arguments: object, **options: object) -> Tensor:
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return torch.zeros(9, 1)

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "new_empty", fail)
        with pytest.raises(torch.OutOfMemoryError):
            life.memory.buffers["a"]._allocate(9)
    assert state_of(life.memory) == before


# -- in a learner


class Cautious(Reservoir):
    """A policy of the user's, which refuses large inputs."""

    def check(self, task: str, x: Inputs, y: Tensor) -> None:
        super().check(task, x, y)
        if isinstance(x, Tensor) and float(x.max()) > 100.0:
            raise TaskError(f"task {task!r}: too large")


@pytest.mark.parametrize("policy", [*ALL_POLICIES, Cautious])
def test_only_classes_that_say_so_draw_ahead(policy: type[Memory]) -> None:
    learner = Learner(torch.nn.Linear(3, 4, device="meta"), make_method("soro"), memory=policy(8))
    assert learner._step.draws_ahead == ("draws_ahead" in vars(policy))


def test_a_policys_own_check_finds_errors_and_leaves_nothing_open() -> None:
    learner = Learner(torch.nn.Linear(3, 4), make_method("soro"), memory=Cautious(8))
    learner.add_task("a", classes=2)
    bad = {"a": (torch.full((2, 3), 1e3), torch.tensor([0, 1]))}
    assert list(learner.find_errors(bad)) == ["a"]
    with pytest.raises(TaskError, match="too large"):
        learner.step(bad)
    assert learner.find_errors({"a": (torch.ones(2, 3), torch.tensor([0, 1]))}) == {}
    assert learner.memory is not None
    assert learner.memory._before is None


def lived(make: Callable[[], Learner], ahead: bool, path: Path, saves: tuple[int, ...] = ()) -> Learner:
    torch.manual_seed(3)
    learner = make()
    learner._step.draws_ahead = ahead
    for event in range(EVENTS):
        live_one_event(learner, event)
        if event in saves:
            learner.save(path)
            learner = Learner.load(path, backbone=TinyResNet(dropout=0.3, seed=event + 1), heads=heads())
            learner._step.draws_ahead = ahead
    return learner


@pytest.mark.parametrize(
    ("memory", "updates"),
    [(BalancedCoreset, 1), (EpochCoreset, 2), (partial(Reservoir, dtype=torch.float32), 2)],
)
@pytest.mark.parametrize("method", ["er", "soro", "der++", "gmed"])
def test_a_learner_that_draws_ahead_learns_the_same(
    method: str, memory: Callable[[int], Memory], updates: int, tmp_path: Path
) -> None:
    def make() -> Learner:
        return Learner(TinyResNet(dropout=0.3), make_method(method), memory=memory(9), memory_batch=4, updates=updates)

    expected = complete_state(lived(make, False, tmp_path / "c"))
    assert_same(complete_state(lived(make, True, tmp_path / "c")), expected)
    assert_same(complete_state(lived(make, True, tmp_path / "c", saves=(2, 5, 6))), expected)


def test_a_step_that_raises_gives_back_what_memory_stored_and_drew() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(output, target)

    def raises() -> None:
        raise KeyboardInterrupt

    learner = Learner(torch.nn.Linear(3, 4), make_method("soro"), memory=Reservoir(8, seed=2))
    learner._step.draws_ahead = True
    learner.add_task("a", head=torch.nn.Linear(4, 1), loss=loss)
    batches = [{"a": (torch.randn(6, 3), torch.randn(6, 1))} for _ in range(4)]
    for batch in batches[:2]:
        learner.step(batch)
    assert learner.memory is not None
    before = state_of(learner.memory)
    update = learner._engine.update
    learner._engine.update = lambda _: raises()  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        learner.step(batches[2])
    learner._engine.update = update  # type: ignore[method-assign]
    assert state_of(learner.memory) == before
