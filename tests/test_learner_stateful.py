"""Tasks added, trained, finished, saved, loaded and predicted in any order, against a plain model of what must hold."""

import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from _learning import assert_same, complete_state
from spcl.errors import TaskError
from spcl.learner import Learner, StepReport
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import ER, SORO

NAMES = ["a", "b", "c", "d", "e"]
BUDGET = 7


@dataclass
class Expected:
    """What is known of one task."""

    classes: int | None
    finished: bool = False
    has_head: bool = False
    observed: int = 0
    skipped: int = 0


@dataclass
class Course:
    """What is known of the whole: the tasks in their order, the steps so far."""

    tasks: dict[str, Expected] = field(default_factory=dict)
    steps: int = 0
    features_known: bool = False

    def running(self) -> list[str]:
        return [name for name, task in self.tasks.items() if not task.finished]

    def classes(self) -> list[tuple[str, int]]:
        return [(name, label) for name, task in self.tasks.items() for label in range(task.classes or 0)]


def backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1))


def inputs(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


class Life(RuleBasedStateMachine):
    """The learner and the model of it, side by side."""

    @initialize(
        scenario=st.sampled_from(["task", "class"]),
        memory=st.sampled_from([Reservoir, BalancedCoreset, None]),
        method=st.sampled_from([ER, SORO]),
        early=st.booleans(),
    )
    def begin(self, scenario: Any, memory: Any, method: Any, early: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.policy = memory
        self.learner = Learner(
            backbone(),
            method(),
            optimizer=partial(torch.optim.Adam, lr=0.01),
            memory=None if memory is None else memory(BUDGET),
            scenario=scenario,
        )
        self.course = Course()
        self.saved: list[tuple[Path, Course, dict[str, Any]]] = []
        if early:
            return
        self.add([2, None])
        self.train_once({name: self.batch(name, 3, 0) for name in NAMES[:2]}, [])
        self.finish_one(NAMES[0])

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    # -- tasks

    @precondition(lambda self: len(self.course.tasks) < len(NAMES))
    @rule(kinds=st.lists(st.sampled_from([1, 2, 3, None]), min_size=1, max_size=2))
    def add(self, kinds: list[int | None]) -> None:
        for name, classes in zip([name for name in NAMES if name not in self.course.tasks], kinds, strict=False):
            own = {"head": nn.Linear(4, 2), "loss": mse_loss}
            self.learner.add_task(name, **(own if classes is None else {"classes": classes}))
            self.course.tasks[name] = Expected(classes, has_head=classes is None or self.course.features_known)

    @precondition(lambda self: len(self.course.running()) > 1)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_one(data.draw(st.sampled_from(self.course.running())))

    def finish_one(self, name: str) -> None:
        self.learner.finish_task(name)
        self.course.tasks[name].finished = True

    # -- training

    @precondition(lambda self: self.course.running())
    @rule(data=st.data(), seed=st.integers(0, 99), steps=st.integers(2, 4))
    def train(self, data: st.DataObject, seed: int, steps: int) -> None:
        for step in range(steps):
            names = data.draw(st.lists(st.sampled_from(self.course.running()), min_size=1, unique=True))
            bad = data.draw(st.just([]) | st.lists(st.sampled_from(names), max_size=1))
            batches = {name: self.batch(name, data.draw(st.integers(2, 5)), seed + step, name in bad) for name in names}
            self.train_once(batches, bad)

    def train_once(self, batches: dict[str, tuple[Tensor, Tensor]], bad: list[str]) -> None:
        replays = self.learner.memory is not None and len(self.learner.memory) > 0
        heads = {name: copy.deepcopy(t.head.state_dict()) for name, t in self.learner.tasks.items() if t.head}
        shared = copy.deepcopy(self.learner.model.backbone.state_dict())
        report = self.learner.step(batches)
        self.note_step(batches, bad, replays, report)
        if set(bad) == set(batches):
            assert_same(self.learner.model.backbone.state_dict(), shared)
        if self.learner.scenario == "task" and not replays:
            for name in (heads.keys() - batches.keys()) | (heads.keys() & set(bad)):
                assert_same(self.learner.tasks[name].head.state_dict(), heads[name])

    def batch(self, name: str, count: int, seed: int, bad: bool = False) -> tuple[Tensor, Tensor]:
        classes = self.course.tasks[name].classes
        x = inputs(count, seed) * (torch.nan if bad else 1.0)
        return x, torch.ones(count, 2) if classes is None else torch.arange(count) % classes

    def note_step(self, batches: dict[str, Any], bad: list[str], replays: bool, report: StepReport) -> None:
        trained = [name for name in self.course.tasks if name in batches and name not in bad]
        assert list(report.losses) == trained + ["memory"] * bool(replays and trained)
        assert list(report.skipped) == bad
        assert report.step == self.course.steps
        self.course.steps += 1
        for name, (x, _) in batches.items():
            task = self.course.tasks[name]
            self.course.features_known |= task.classes is not None
            task.observed += 0 if name in bad else len(x)
            task.skipped += name in bad
        for task in self.course.tasks.values():
            task.has_head |= self.course.features_known

    # -- predictions

    @rule(count=st.integers(1, 4))
    def predict(self, count: int) -> None:
        for name, task in self.course.tasks.items():
            if not task.has_head:
                self.refused(partial(self.learner.predict, inputs(count, 5), task=name), f"'{name}' has seen no data")
                continue
            found = self.learner.predict(inputs(count, 5), task=name)
            assert torch.equal(self.learner.predict(inputs(count, 5), task=name), found)
            assert found.shape == ((count, 2) if task.classes is None else (count,))
            assert task.classes is None or bool(((found >= 0) & (found < task.classes)).all())

    @rule(count=st.integers(1, 4))
    def predict_over_all_classes(self, count: int) -> None:
        x, classes = inputs(count, 5), self.course.classes()
        if self.learner.scenario == "task" or not classes or not self.course.features_known:
            self.refused(lambda: self.learner.predict(x), "needs the task of x|no classification task|no data yet")
            return
        found = self.learner.predict(x)
        assert self.learner.logits(x).shape == (count, len(classes))
        assert ((found >= 0) & (found < len(classes))).all()

    # -- mistakes

    @precondition(lambda self: self.course.tasks)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def make_a_mistake(self, data: st.DataObject, seed: int) -> None:
        name = data.draw(st.sampled_from(list(self.course.tasks)))
        x, y = self.batch(name, 4, seed)
        others = {other: self.batch(other, 3, seed) for other in self.course.running() if other != name}
        calls = {
            f"a task '{name}' already": lambda: self.learner.add_task(name, classes=2),
            "no task 'stranger'": lambda: self.learner.step({**others, "stranger": (x, y)}),
            f"task '{name}'": lambda: self.learner.step({**others, name: (x, y[:3])}),
            f"task '{name}' ": lambda: self.learner.step({**others, name: (x[:0], y[:0])}),
        }
        if self.course.tasks[name].classes is not None:
            calls[f"'{name}' (is finished|has classes)"] = lambda: self.learner.step({**others, name: (x, y + 3)})
        if self.course.tasks[name].finished:
            calls[f"task '{name}' is finished already"] = lambda: self.learner.finish_task(name)
        for words, call in calls.items():
            self.refused(call, words.rstrip())

    # -- checkpoints

    @precondition(lambda self: len(self.saved) < 3)
    @rule()
    def save(self) -> None:
        path = self.folder / str(len(self.saved))
        state = complete_state(self.learner)
        self.learner.save(path)
        assert_same(complete_state(self.learner), state)
        self.saved.append((path, copy.deepcopy(self.course), state))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        path, course, state = data.draw(st.sampled_from(self.saved))
        heads = {n: (nn.Linear(4, 2), mse_loss) for n, task in course.tasks.items() if task.classes is None}
        self.learner = Learner.load(path, backbone=backbone(), heads=heads)
        self.course = copy.deepcopy(course)
        assert_same(complete_state(self.learner), state)

    # -- what always holds

    def refused(self, call: Any, words: str) -> None:
        before = complete_state(self.learner)
        with pytest.raises(TaskError, match=words):
            call()
        assert_same(complete_state(self.learner), before)

    @invariant()
    def the_tasks_are_as_expected(self) -> None:
        assert list(self.learner.tasks) == list(self.course.tasks)
        assert self.learner.active_tasks == self.course.running()
        assert self.learner.classes == self.course.classes()
        assert self.learner.steps == self.course.steps
        for name, expected in self.course.tasks.items():
            task = self.learner.tasks[name]
            assert (task.finished, task.head is not None) == (expected.finished, expected.has_head)
            assert task.skipped == expected.skipped

    @invariant()
    def the_memory_is_as_expected(self) -> None:
        memory, tasks = self.learner.memory, self.course.tasks
        if memory is None:
            return
        assert memory.seen == sum(task.observed for task in tasks.values())
        if self.policy is Reservoir:
            assert len(memory) == min(BUDGET, memory.seen)
        else:
            assert set(memory.counts()) == {name for name, task in tasks.items() if task.finished}
            assert len(memory) <= min(BUDGET, sum(task.observed for task in tasks.values() if task.finished))
        assert all(part.x.isfinite().all() for part in copy.deepcopy(memory).draw(BUDGET))

    @invariant()
    def everything_is_finite(self) -> None:
        for module in self.learner.model.modules():
            assert all(value.isfinite().all() for value in module.state_dict().values())


TestLife = pytest.mark.filterwarnings("ignore:task .* was skipped in 3 steps in a row")(Life.TestCase)
TestLife.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
