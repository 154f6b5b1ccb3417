"""A memory that changes and draws before it is asked to: nobody can tell, and all of it can be undone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from _learning import TinyResNet, assert_same, complete_state
from spcl.batches import Inputs
from spcl.errors import TaskError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, EpochCoreset, Memory, ReplayBatch, Reservoir
from spcl.methods import make_method
from test_learner_resume import EVENTS, heads, live_one_event

POLICIES = [BalancedCoreset, EpochCoreset, Reservoir]
TASKS = ("a", "b", "c")

observe = st.tuples(st.just("observe"), st.sampled_from(TASKS), st.integers(1, 9))
finish = st.tuples(st.just("finish"), st.sampled_from(TASKS), st.just(0))
draw = st.tuples(st.just("draw"), st.just(""), st.integers(1, 6))
replace = st.tuples(st.just("replace"), st.just(""), st.integers(1, 6))
lives = st.lists(observe | finish | draw | replace, max_size=25)
Event = tuple[str, str, int]


class Life:
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
    return tuple(map(str, (batch.task, batch.x, batch.y, batch.logits, batch.slots, batch.edits)))


def state_of(memory: Memory) -> str:
    state: dict[str, Any] = memory.state_dict()
    return str(state) + str(memory.nbytes)


@pytest.mark.parametrize("policy", POLICIES)
@given(life=lives, ahead=st.lists(st.integers(0, 6), min_size=25, max_size=25), seed=st.integers(0, 9))
def test_draws_made_ahead_change_nothing(policy: type[Memory], life: list[Event], ahead: list[int], seed: int) -> None:
    one, other = Life(policy, seed), Life(policy, seed)
    for event, count in zip(life, ahead, strict=False):
        for _ in range(count % 3):
            other.memory.draw_ahead(count)
        assert one.live(event) == other.live(event)
    assert state_of(one.memory) == state_of(other.memory)


@pytest.mark.parametrize("policy", POLICIES)
@given(before=lives, undone=lives, after=lives, seed=st.integers(0, 9))
def test_what_is_undone_leaves_no_trace(
    policy: type[Memory], before: list[Event], undone: list[Event], after: list[Event], seed: int
) -> None:
    steps = [event for event in undone if event[0] != "finish"]  # tasks end between steps
    one, other = Life(policy, seed), Life(policy, seed)
    for event in before:
        assert one.live(event) == other.live(event)
    other.memory.begin()
    for _ in range(2):
        for event in steps:
            other.live(event)
            other.memory.draw_ahead(2)
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
    memory.draw_ahead(5)
    memory.rollback(draws=False)
    second = memory.draw(5)[0].x
    memory.rollback()
    assert first.tolist() != second.tolist()
    assert memory.draw(5)[0].x.tolist() == first.tolist()


@pytest.mark.parametrize("policy", POLICIES)
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
    with pytest.raises(TaskError, match="task 'b' cannot finish within a step; finish it when the step has returned"):
        learner.step(batches, meanwhile=lambda: learner.finish_task("b"))
    assert_same(before, complete_state(learner))
    learner.step(batches)
    learner.finish_task("b")
    assert len(learner.memory) <= 8


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


@pytest.mark.parametrize("policy", POLICIES)
def test_edited_samples_are_drawn_though_others_were_drawn_ahead(policy: type[Memory]) -> None:
    life = Life(policy, 0)
    life.live(("observe", "a", 9))
    life.live(("finish", "a", 0))
    (batch,) = life.memory.draw(9)
    life.memory.draw_ahead(9)
    life.memory.replace(batch, batch.x + 0.25)
    assert all(float(x) % 1 == 0.25 for x in life.memory.draw(9)[0].x)


def test_loading_forgets_what_was_drawn_ahead_and_begun() -> None:
    life, other = Life(Reservoir, 0), Life(Reservoir, 0)
    life.live(("observe", "a", 9))
    before = state_of(life.memory)
    saved = life.memory.state_dict()
    life.live(("observe", "b", 9))
    life.memory.begin()
    life.memory.draw_ahead(4)
    life.memory.load_state_dict(saved)
    life.memory.rollback()
    assert state_of(life.memory) == before
    other.memory.load_state_dict(saved)
    assert life.live(("draw", "", 4)) == other.live(("draw", "", 4))


def test_what_is_committed_is_not_undone() -> None:
    life = Life(Reservoir, 0)
    life.memory.begin()
    life.live(("observe", "a", 9))
    life.memory.commit()
    before = state_of(life.memory)
    life.memory.rollback()
    assert state_of(life.memory) == before
    assert life.memory.draw(0) == []


def test_want_of_memory_loses_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(Reservoir, 0)
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


@pytest.mark.parametrize("policy", [*POLICIES, Cautious])
def test_only_classes_that_say_so_draw_ahead(policy: type[Memory]) -> None:
    learner = Learner(torch.nn.Linear(3, 4, device="meta"), make_method("soro"), memory=policy(8))
    assert learner._runner.draws_ahead == (policy in POLICIES)


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
    learner._runner.draws_ahead = ahead
    for event in range(EVENTS):
        live_one_event(learner, event)
        if event in saves:
            learner.save(path)
            learner = Learner.load(path, backbone=TinyResNet(dropout=0.3, seed=event + 1), heads=heads())
            learner._runner.draws_ahead = ahead
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
    learner._runner.draws_ahead = True
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
