"""Schedule, clipping, averaged weights, augmentation and updates per step, against plain PyTorch and by hand."""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _learning import PlainMoment, TinyResNet, assert_same, batch, complete_state, images
from cuda_sync import synchronization_forbidden
from spcl.checkpoint import write_checkpoint
from spcl.engine.graphs import CudaGraphEngine
from spcl.engine.update import Update, WeightAverage
from spcl.errors import CheckpointError, SpclError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import ER, GMED, METHODS, SORO, Gradients, Method, Weights, make_method
from spcl.schedules import Cosine
from spcl.transforms import Compose, Crop, Flip

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
SHIFTS = Compose([Crop(padding=1), Flip()])


def head(seed: int, outputs: int = 3) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(8, outputs)


def decay(step: int) -> float:
    return 0.8**step


# -- against plain PyTorch


class Plain:
    """A training loop in plain PyTorch with LambdaLR, clipping and an average written by hand."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = nn.Sequential(TinyResNet(), head(1)).double()
        self.averaged = copy.deepcopy(self.model)
        self.optimizer = make(list(self.model.parameters()))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decay)
        self.steps = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in self.model.parameters()))
        assert norm > 0.2  # else nothing is clipped
        for parameter in self.model.parameters():
            parameter.grad.mul_(0.2 / (norm + 1e-6))
        self.optimizer.step()
        self.schedule.step()
        rate, self.steps = max(0.1, 9 / (10 + self.steps)), self.steps + 1
        averages = self.averaged.state_dict()
        for name, current in self.model.state_dict().items():
            if current.is_floating_point():
                averages[name] += rate * (current - averages[name])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedule_clipping_and_average_are_those_of_a_plain_loop(optimizer: str, captured: bool) -> None:
    learner = Learner(
        TinyResNet().double(), ER(), optimizer=OPTIMIZERS[optimizer], schedule=decay, clip_norm=0.2, average=0.9
    )
    if captured:
        learner._use_engine(CudaGraphEngine(learner.model, learner.method))
    learner.add_task("a", head=head(1).double(), loss=cross_entropy)
    plain = Plain(OPTIMIZERS[optimizer])
    x = images(7, 99, torch.float64)
    for seed in range(5):
        data = batch(9, 3, seed, torch.float64)
        learner.step({"a": data})
        plain.step(*data)
        current = nn.Sequential(learner.model.backbone, learner.tasks["a"].head)
        for mine, theirs in zip(current.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
        expected = plain.averaged.eval()(x).detach()
        torch.testing.assert_close(learner.logits(x, "a"), expected)
        torch.testing.assert_close(learner.module("a")(x), expected)
        labels = expected.argmax(dim=1)
        assert learner.evaluate([(x, labels)], "a") == pytest.approx(float(cross_entropy(expected, labels)))


@pytest.mark.parametrize("reduction", ["er", "soro"])
def test_an_update_smaller_than_the_largest_norm_is_not_clipped(reduction: str) -> None:
    learners = [Learner(TinyResNet(), make_method(reduction), clip_norm=norm) for norm in (None, 1e6)]
    for learner in learners:
        learner.add_task("a", classes=3)
        for seed in range(2):
            learner.step({"a": batch(6, 3, seed)})
    for mine, theirs in zip(*(learner.model.backbone.parameters() for learner in learners), strict=True):
        torch.testing.assert_close(mine, theirs)


# -- averaged weights


def test_heads_join_the_average_with_their_first_weights_and_soon_catch_up() -> None:
    learner = Learner(TinyResNet(), SORO(), average=0.75)
    learner.add_task("a", head=head(1), loss=cross_entropy)
    weights = lambda: {  # noqa: E731
        (name, key): value.detach().clone()
        for name, task in learner.tasks.items()
        for key, value in task.head.named_parameters()
    }
    expected = weights()
    for step in range(6):
        if step == 3:
            learner.add_task("b", head=head(2, 2), loss=cross_entropy)
            expected |= {name: value for name, value in weights().items() if name not in expected}
        learner.step({name: batch(6, 2, step) for name in learner.tasks})
        for (name, key), value in expected.items():
            rate = max(0.25, 9 / (10 + step - (3 if name == "b" else 0)))
            expected[name, key] = value + rate * (weights()[name, key] - value)
    for (name, key), value in expected.items():
        torch.testing.assert_close(dict(learner.module(name).head.named_parameters())[key], value)


def test_predictions_leave_the_weights_of_training_alone_and_modules_follow_the_average() -> None:
    learner = Learner(TinyResNet(), SORO(), average=0.9)
    learner.add_task("a", classes=3)
    learner.step({"a": batch(6, 3, 0)})
    module, x = learner.module("a"), images(4, 5)
    before = complete_state(learner)
    first = learner.predict_proba(x, "a")
    assert_same(complete_state(learner), before)
    learner.step({"a": batch(6, 3, 1)})
    assert not torch.equal(learner.predict_proba(x, "a"), first)
    assert torch.equal(module(x), learner.logits(x, "a"))
    current = nn.Sequential(learner.model.backbone, learner.tasks["a"].head).eval()
    assert not torch.allclose(current(x), learner.logits(x, "a"), atol=1e-5)


def test_memory_stores_logits_of_the_average_when_a_task_finishes() -> None:
    learner = Learner(TinyResNet(), make_method("der++"), memory=BalancedCoreset(5), average=0.9)
    learner.add_task("a", classes=3)
    for seed in range(3):
        learner.step({"a": batch(6, 3, seed)})
    learner.finish_task("a")
    stored = learner.memory.buffers["a"]
    network = learner.module("a").train()  # batch-norm takes the statistics of the batch
    with torch.no_grad():
        torch.testing.assert_close(stored.take("logits"), network(stored.take("x")))
    assert not torch.allclose(stored.take("logits"), learner.logits(stored.take("x"), "a"), rtol=0.1)


def test_storing_logits_leaves_running_averages_alone_and_takes_one_sample() -> None:
    learner = Learner(TinyResNet(), make_method("der++"), memory=BalancedCoreset(1))
    learner.add_task("a", classes=3)
    learner.step({"a": batch(6, 3, 0)})
    before = complete_state(learner)["backbone"]
    learner.finish_task("a")
    assert_same(complete_state(learner)["backbone"], before)
    part = learner.memory.draw(1)[0]
    torch.testing.assert_close(part.logits, learner.logits(part.x, "a"))


def test_batch_norm_is_averaged_with_its_weights() -> None:
    learner = Learner(TinyResNet(), SORO(), average=0.99)
    learner.add_task("a", classes=3)
    layer = learner.model.backbone.stem[1]
    expected = layer.running_mean.clone()
    for step in range(4):
        learner.step({"a": batch(6, 3, step)})
        expected += max(0.01, 9 / (10 + step)) * (layer.running_mean - expected)
    assert not torch.allclose(layer.running_mean, expected)
    for module in (learner.module("a").backbone, learner.snapshot().model.backbone):
        torch.testing.assert_close(module.stem[1].running_mean, expected)


def test_averages_of_an_earlier_version_go_on_without_a_warm_up(tmp_path: Path) -> None:
    learner = Learner(TinyResNet(), SORO(), average=0.75)
    learner.add_task("a", classes=3)
    learner.step({"a": batch(6, 3, 0)})
    state = learner._state()
    for averages in state["average"].values():
        for name in [name for name in averages if "running" in name]:
            del averages[name]
    del state["average_updates"]
    write_checkpoint(tmp_path / "old", state | {"sources": {}})
    loaded = Learner.load(tmp_path / "old", backbone=TinyResNet())
    weight = lambda module: module.head.weight.detach().clone()  # noqa: E731
    before = weight(loaded.module("a"))
    loaded.step({"a": batch(6, 3, 1)})
    now = loaded.tasks["a"].head.weight.detach()
    torch.testing.assert_close(weight(loaded.module("a")), 0.75 * before + 0.25 * now)


def test_a_skipped_task_leaves_the_average_as_if_it_had_not_been_there() -> None:
    def trained(with_nan: bool) -> Learner:
        torch.manual_seed(0)
        habits = {"average": 0.9, "augment": SHIFTS, "clip_norm": 1.0, "schedule": decay}
        learner = Learner(TinyResNet(dropout=0.2), SORO(), memory=Reservoir(6), **habits)
        for name in ("b", "a"):
            learner.add_task(name, classes=2)
        for step in range(5):
            nan = {"b": (images(5, step) * torch.nan, torch.zeros(5, dtype=torch.int64))}
            report = learner.step({"a": batch(4, 2, step)} | (nan if with_nan else {}))
            assert set(report.skipped) == ({"b"} if with_nan else set())
        return learner

    with pytest.warns(RuntimeWarning, match="task 'b' was skipped in 3 steps in a row"):
        found = complete_state(trained(True))
    expected = complete_state(trained(False))
    for state in (found, expected):
        state["tasks"] = [task["head"] for task in state["tasks"]]
    assert_same(found, expected)


class Raising(Method):
    """Raises an error in the third update."""

    name = "raising"
    calls = 0

    def weigh(self, gradients: Gradients) -> Weights:
        self.calls += 1
        if self.calls == 3:
            raise KeyError("third")
        return Weights(torch.ones(len(gradients.names)))


def test_a_step_that_raises_leaves_everything_as_it_was() -> None:
    learner = Learner(TinyResNet(), Raising(), average=0.9, schedule=decay, clip_norm=1.0, augment=SHIFTS)
    learner.add_task("a", classes=2)
    for seed in range(2):
        learner.step({"a": batch(4, 2, seed)})
    before = complete_state(learner)
    with pytest.raises(KeyError, match="third"):
        learner.step({"a": batch(4, 2, 2)})
    assert_same(complete_state(learner), before)


# -- augmentation


def mirrored(x: Tensor) -> Tensor:
    return x.flip(-1)


@pytest.mark.parametrize("method", ["er", "soro", "der++", "a-gem"])
def test_new_and_replayed_samples_are_augmented_and_memory_stores_them_as_they_came(method: str) -> None:
    augmented, plain = (
        Learner(TinyResNet(), make_method(method), memory=Reservoir(5), augment=augment) for augment in (mirrored, None)
    )
    for step in range(6):
        if step in (0, 2):
            for learner in (augmented, plain):
                learner.add_task(str(step), classes=3)
        data = {name: batch(4, 3, 10 * step + int(name)) for name in augmented.tasks}
        mine = augmented.step(data)
        theirs = plain.step({name: (mirrored(x), y) for name, (x, y) in data.items()})
        assert mine.losses == theirs.losses
    assert "memory" in mine.losses
    assert_same(dict(augmented.model.backbone.state_dict()), dict(plain.model.backbone.state_dict()))
    for mine, theirs in zip(*(learner.memory.draw(5) for learner in (augmented, plain)), strict=True):
        assert torch.equal(mine.x, mirrored(theirs.x))


def test_inputs_of_one_shape_and_type_are_augmented_in_one_call() -> None:
    calls = []

    def noted(x: Tensor) -> Tensor:
        calls.append((x.dtype, *x.shape))
        return x

    learner = Learner(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 8)), SORO(), augment=noted)
    for name in "abc":
        learner.add_task(name, classes=2)
    small = torch.randn(3, 2, 2, 2)
    learner.step({"a": batch(4, 2, 0), "b": (small, torch.tensor([0, 1, 0])), "c": batch(5, 2, 1)})
    assert calls == [(torch.float32, 9, 2, 4, 4), (torch.float32, 3, 2, 2, 2)]


def test_a_method_that_edits_memory_edits_samples_as_they_came() -> None:
    learner = Learner(TinyResNet(), GMED(), memory=Reservoir(5, dtype=torch.float32), augment=torch.zeros_like)
    learner.add_task("a", classes=2)
    x, y = batch(5, 2, 0)
    learner.step({"a": (x, y)})
    learner.step({"a": (x, y)})
    stored = torch.cat([part.x for part in learner.memory.draw(5)])
    distances = torch.cdist(stored.flatten(1), x.flatten(1)).min(dim=1).values
    assert (distances < 0.5 * x.flatten(1).norm(dim=1).min()).all()


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        (lambda x: x[1:], r"augment must give as many samples as it gets, 4, but it gives 3"),
        (lambda x: [x], r"augment must give a Tensor as it gets, but it gives a list"),
    ],
)
def test_an_augmentation_that_loses_samples_is_refused(augment: Any, words: str) -> None:
    learner = Learner(TinyResNet(), SORO(), augment=augment)
    learner.add_task("a", classes=2)
    with pytest.raises(SpclError, match=words):
        learner.step({"a": batch(4, 2, 0)})
    assert learner.steps == 0


# -- updates


class Gated(Reservoir):
    """A reservoir that ignores samples while it is closed."""

    closed = False

    def observe(self, task: str, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        if not self.closed:
            super().observe(task, x, y, logits)


@pytest.mark.parametrize("name", METHODS)
def test_several_updates_are_as_many_steps_of_which_memory_observes_the_last(name: str) -> None:
    def trained(updates: int) -> tuple[Learner, list[Any]]:
        torch.manual_seed(0)
        memory = Gated(6, seed=1, dtype=torch.float32)
        learner = Learner(TinyResNet(dropout=0.2), make_method(name), memory=memory, augment=SHIFTS, updates=updates)
        learner.add_task("a", classes=2)
        learner.add_task("b", classes=3)
        reports = []
        for step in range(3):
            data = {"a": batch(4, 2, step), "b": batch(5, 3, 50 + step)}
            for update in range(3 // updates):
                memory.closed = updates == 1 and update < 2
                reports.append(learner.step(data))
        return learner, reports

    (once, reports), (thrice, singly) = trained(3), trained(1)
    assert [report.losses for report in reports] == [report.losses for report in singly[::3]]
    assert [report.step for report in reports] == [0, 1, 2]
    found, expected = complete_state(once), complete_state(thrice)
    assert (found["learner"].pop("updates"), found["learner"].pop("steps")) == (3, 3)
    assert expected["learner"].pop("steps") == 9
    assert_same(found, expected)


def test_a_task_that_is_skipped_in_one_update_is_left_out_of_the_rest_and_of_memory() -> None:
    learner = Learner(TinyResNet(), SORO(), memory=Reservoir(20), updates=3)
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=2)
    report = learner.step({"a": batch(4, 2, 0), "b": (images(4, 0) * torch.inf, torch.zeros(4, dtype=torch.int64))})
    assert set(report.skipped) == {"b"}
    assert set(report.losses) == {"a"}
    assert learner.memory.counts() == {"a": [2, 2], "b": [0, 0]}
    assert learner.tasks["b"].skipped == 1


def test_work_for_the_meantime_is_done_once_in_a_step_of_several_updates() -> None:
    learner, calls = Learner(TinyResNet(), SORO(), updates=4), []
    learner.add_task("a", classes=2)
    learner.fit([PlainMoment({"a": batch(4, 2, 0)})], meanwhile=lambda: calls.append(1))
    assert calls == [1]


# -- checkpoints

HABITS: dict[str, Any] = {
    "schedule": Cosine(40, warmup=0.2),
    "clip_norm": 0.5,
    "average": 0.9,
    "augment": SHIFTS,
    "updates": 2,
}


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_with_all_habits_resumes_bit_for_bit(optimizer: str, scenario: str, tmp_path: Path) -> None:
    def trained(interrupted: bool) -> Learner:
        torch.manual_seed(3)
        memory = BalancedCoreset(9, seed=5)
        options = {"optimizer": OPTIMIZERS[optimizer], "scenario": scenario}
        learner = Learner(TinyResNet(dropout=0.3), SORO(), memory=memory, **options, **HABITS)
        for step in range(8):
            if step in (0, 3):
                learner.add_task(f"task {step}", classes=3)
            if step == 5:
                learner.finish_task("task 0")
            learner.step({name: batch(5, 3, step) for name in learner.active_tasks})
            if interrupted and step in (0, 3, 6):
                learner.save(tmp_path / "c")
                torch.manual_seed(step)
                functions = {name: HABITS[name] for name in ("schedule", "augment")}
                learner = Learner.load(tmp_path / "c", backbone=TinyResNet(dropout=0.3, seed=step + 1), **functions)
        return learner

    found, expected = trained(True), trained(False)
    assert_same(complete_state(found), complete_state(expected))
    assert {name: getattr(found, name) for name in HABITS} == HABITS
    x = images(5, 0)
    assert torch.equal(found.logits(x, "task 0"), expected.logits(x, "task 0"))


def test_functions_that_were_used_are_asked_for_and_others_refused(tmp_path: Path) -> None:
    Learner(TinyResNet(), ER(), schedule=decay, augment=mirrored).save(tmp_path / "with")
    Learner(TinyResNet(), ER()).save(tmp_path / "without")
    with pytest.raises(CheckpointError, match="the checkpoint was made with schedule=, which is a function; pass it"):
        Learner.load(tmp_path / "with", backbone=TinyResNet(), augment=mirrored)
    with pytest.raises(CheckpointError, match="the checkpoint was made with augment=, which is a function; pass it"):
        Learner.load(tmp_path / "with", backbone=TinyResNet(), schedule=decay)
    with pytest.raises(CheckpointError, match="the checkpoint was made without schedule=; load it without"):
        Learner.load(tmp_path / "without", backbone=TinyResNet(), schedule=decay)


def test_checkpoints_are_as_before_where_no_habit_is_used() -> None:
    state = Learner(TinyResNet(), ER())._state()
    names = "scenario memory_batch autocast measure_stability capture seed steps feature_dim"
    assert sorted(state["learner"]) == sorted(names.split())
    assert "average" not in state


# -- wrong arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": 0.1}, "schedule must be a function, but it is 0.1; see spcl.schedules"),
        ({"augment": "flip"}, "augment must be a function, but it is 'flip'; see spcl.transforms"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; give the largest norm of an update, a positive number, or None"),
        ({"clip_norm": math.inf}, "clip_norm is inf"),
        ({"average": 1.0}, "average is 1.0; give the decay of the average, from 0 to below 1, or None"),
        ({"average": True}, "average is True"),
        ({"updates": 0}, "updates is 0; give a positive whole number"),
        ({"updates": 1.5}, "updates is 1.5"),
    ],
)
def test_wrong_arguments_are_refused(options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(SpclError, match=words):
        Learner(TinyResNet(), ER(), **options)


@pytest.mark.parametrize("factor", [None, -1.0, math.nan, "half"])
def test_a_schedule_that_gives_no_factor_is_refused_before_anything_changes(factor: Any) -> None:
    learner = Learner(TinyResNet(), ER(), schedule=lambda step: factor if step else 1.0)
    learner.add_task("a", classes=2)
    learner.step({"a": batch(4, 2, 0)})
    before = complete_state(learner)
    with pytest.raises(SpclError, match=r"must give a factor of at least 0, but it gives .* for step 1"):
        learner.step({"a": batch(4, 2, 1)})
    assert_same(complete_state(learner), before)


# -- on a GPU

RATE = 0.001
ADAM = partial(torch.optim.Adam, lr=RATE, eps=1e-3, fused=True, capturable=True)  # rounding must not decide


def on_a_gpu(capture: bool, **habits: Any) -> Learner:
    torch.manual_seed(0)
    learner = Learner(TinyResNet().cuda(), SORO(), optimizer=ADAM, memory=Reservoir(20), capture=capture, **habits)
    learner.add_task("a", classes=3)
    for step in range(20):
        if step == 8:
            learner.add_task("b", classes=200)  # more classes than there was room for: the heads move
        learner.step({name: tuple(part.cuda() for part in batch(8, 3, step)) for name in learner.tasks})
    return learner


@needs_gpu
@pytest.mark.parametrize("habits", [*[{name: value} for name, value in HABITS.items()], HABITS], ids=[*HABITS, "all"])
def test_captured_habits_are_those_of_the_eager_engine(habits: dict[str, Any]) -> None:
    eager, captured = (on_a_gpu(capture, **habits) for capture in (False, True))
    assert captured._engine._capture.unsupported is None
    x = images(6, 77).cuda()
    for task in ("a", "b"):
        torch.testing.assert_close(captured.logits(x, task), eager.logits(x, task), rtol=5e-3, atol=5e-3)
    for mine, theirs in zip(captured.model.backbone.parameters(), eager.model.backbone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-3, atol=5e-3)


@needs_gpu
def test_a_schedule_does_not_capture_the_update_again() -> None:
    habits = HABITS | {"updates": 1}
    constant, scheduled = (on_a_gpu(True, **habits | {"schedule": s}) for s in (lambda _: 1.0, Cosine(40)))
    counts = [len(learner._engine._update._cache._counts) for learner in (constant, scheduled)]
    assert counts[0] == counts[1] < 6
    assert scheduled._engine._update._cache._replays
    rates = [group["lr"] for group in scheduled.optimizer.param_groups]
    assert all(rate.is_cuda and float(rate) == pytest.approx(RATE * Cosine(40)(19)) for rate in rates)


@needs_gpu
def test_an_update_does_not_wait_for_the_gpu() -> None:
    module = nn.Linear(4, 3).cuda()
    average = WeightAverage(0.9)
    average.follow([module])
    optimizer = ADAM(module.parameters())
    module(torch.randn(2, 4).cuda()).sum().backward()
    for factor in (1.0, 0.5, 0.25):
        update = Update(optimizer, factor, 0.1, average)
        update.set_learning_rates()
        with synchronization_forbidden():
            update.set_learning_rates()
            update.apply()


@needs_gpu
def test_training_with_all_habits_resumes_on_a_gpu(tmp_path: Path) -> None:
    learner = on_a_gpu(False, **HABITS)
    learner.save(tmp_path / "c")
    functions = {name: HABITS[name] for name in ("schedule", "augment")}
    loaded = Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1).cuda(), **functions)
    state = torch.cuda.get_rng_state()
    for each in (loaded, learner):
        torch.cuda.set_rng_state(state)
        each.step({"a": tuple(part.cuda() for part in batch(8, 3, 31))})
    x = images(6, 77).cuda()
    torch.testing.assert_close(loaded.logits(x, "a"), learner.logits(x, "a"), rtol=1e-4, atol=1e-4)


@needs_gpu
@pytest.mark.parametrize("transform", [Flip(1.0), Compose((Flip(1.0), Flip(1.0)))])
def test_a_captured_transform_is_that_of_the_eager_engine(transform: Any) -> None:
    eager, captured = (on_a_gpu(capture, augment=transform) for capture in (False, True))
    assert captured._engine._augmentation._cache._replays
    x = images(6, 77).cuda()
    torch.testing.assert_close(captured.logits(x, "a"), eager.logits(x, "a"), rtol=5e-3, atol=5e-3)


@needs_gpu
def test_a_captured_transform_draws_anew_at_every_replay() -> None:
    learner = Learner(TinyResNet().cuda(), SORO())
    x, crop = images(16, 0).cuda(), Crop(1)
    engine = learner._engine
    results = []
    for _ in range(12):
        engine._augmentation.begin()
        found = engine._augment(crop, [x[:10], x[10:]])
        results.append(torch.cat([part.clone() for part in found]))
    assert engine._augmentation._cache._replays
    padded = nn.functional.pad(x, [1] * 4)
    shifts = torch.stack([padded[:, :, i : i + x.shape[2], j : j + x.shape[3]] for i in range(3) for j in range(3)])
    for result in results:
        assert bool((result == shifts).flatten(2).all(dim=2).any(dim=0).all())
    assert len({result.cpu().numpy().tobytes() for result in results[6:]}) == 6


@needs_gpu
def test_a_transform_that_decides_on_the_host_is_not_captured() -> None:
    learner = on_a_gpu(True, augment=mirrored)
    assert not learner._engine._augmentation._cache._counts


@pytest.mark.parametrize(
    ("name", "value"), [("updates", 0), ("memory_batch", 2.5), ("measure_stability", "yes"), ("clip_norm", -1.0)]
)
def test_an_option_that_is_set_later_is_checked_at_once(name: str, value: object) -> None:
    learner = Learner(nn.Linear(3, 8), ER())
    before = getattr(learner, name)
    with pytest.raises(SpclError, match=f"{name} is {value!r}; give "):
        setattr(learner, name, value)
    assert getattr(learner, name) == before
