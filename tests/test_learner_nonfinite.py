"""A task whose loss or gradient is not finite leaves no trace, and a step that fails changes nothing."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from _learning import Agreement, Preferences, TinyResNet, assert_same, batch, complete_state, images
from spcl.engine import EagerEngine
from spcl.errors import TaskError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, ReplayBatch, Reservoir
from spcl.methods import DWA, ER, MEMORY, SORO, SORODBT, Gradients, LookAhead, Method, Weights
from test_learner_capture import capture_without_graphs

GOOD, NO_GRADIENT, HUGE_GRADIENT, RAISES, INTERRUPTS = 0.0, 2.0, 3.0, 4.0, 5.0  # what targets ask of the touchy loss


def touchy_loss(output: Tensor, target: Tensor) -> Tensor:
    """A squared error that goes wrong in the way the targets ask for."""
    match float(target.max()):
        case value if value == NO_GRADIENT:
            return (0 * output).sum().sqrt()
        case value if value == HUGE_GRADIENT:
            return 1e30 * output.mean()
        case value if value == RAISES:
            raise ValueError("a target of 4")
        case value if value == INTERRUPTS:
            raise KeyboardInterrupt
    return mse_loss(output, target)


def make_learner(method: Method, scenario: str = "task", memory: bool = True, captured: bool = False) -> Learner:
    """Classifiers around a touchy regression whose head has batch-norm too; one more classifier is rehearsed."""
    learner = Learner(
        TinyResNet(dropout=0.3),
        method,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        memory=BalancedCoreset(12) if memory else None,
        scenario=scenario,
    )
    if captured:
        capture_without_graphs(learner)
    torch.manual_seed(0)
    learner.add_task("old", classes=2)
    learner.add_task("first", classes=3)
    learner.add_task(
        "touchy", head=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), loss=touchy_loss
    )
    learner.add_task("last", classes=2)
    learner.step({"old": batch(6, 2, 0), **good_batches(1), "touchy": (images(5, 2), torch.zeros(5, 1))})
    learner.finish_task("old")
    return learner


def good_batches(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {"first": batch(7, 3, seed), "last": batch(4, 2, seed + 1)}


def target(value: float, count: int = 9) -> Tensor:
    return torch.full((count, 1), value)


BAD = {
    "NaN inputs": ((images(9, 5) * torch.nan, target(GOOD)), "its loss is nan"),
    "an infinite input": ((images(9, 5) / (images(9, 5) * 0), target(GOOD)), "its loss is nan"),
    "an infinite loss": ((images(9, 5), target(1e30)), "its loss is inf"),
    "a NaN gradient": ((images(9, 5), target(NO_GRADIENT)), "its gradient is not finite"),
    "a gradient too large": ((images(9, 5), target(HUGE_GRADIENT)), "its gradient is not finite, or too large"),
    "inputs too large": ((images(9, 5) * 1e25, target(GOOD)), "running averages overflow"),
}
EVERY_METHOD = pytest.mark.parametrize(
    "method",
    [ER, SORO, partial(SORODBT, alpha=0.01), Preferences, Agreement],
    ids=["er", "soro", "soro+dbt", "sum", "elementwise"],
)


def without_counters(state: dict[str, Any]) -> dict[str, Any]:
    for task in state["tasks"]:
        del task["left_out"], task["left_out_in_a_row"]
    return state


@pytest.mark.parametrize(
    ("scenario", "memory", "captured"),
    [("task", False, False), ("class", True, False), ("class", True, True)],
    ids=["task", "class and memory", "captured"],
)
@pytest.mark.parametrize("kind", BAD)
@EVERY_METHOD
def test_the_others_train_exactly_as_if_the_bad_task_were_absent(
    method: Callable[[], Method], kind: str, scenario: str, memory: bool, captured: bool
) -> None:
    bad, reason = BAD[kind]
    learner = make_learner(method(), scenario, memory, captured)
    report = learner.step({**good_batches(3), "touchy": bad})
    assert list(report.skipped) == ["touchy"]
    assert reason in report.skipped["touchy"]
    assert list(report.losses) == ["first", "last", *(["memory"] if memory else [])]
    assert (learner.tasks["touchy"].skipped, learner.tasks["touchy"].skipped_in_a_row) == (1, 1)
    assert_same(without_counters(complete_state(learner)), state_without(method, scenario, memory, captured))


@cache
def state_without(method: Callable[[], Method], scenario: str, memory: bool, captured: bool) -> dict[str, Any]:
    """The state after the same step on the good batches alone."""
    learner = make_learner(method(), scenario, memory, captured)
    assert not learner.step(good_batches(3)).skipped
    return without_counters(complete_state(learner))


@pytest.mark.parametrize("kind", ["NaN inputs", "a NaN gradient", "inputs too large"])
@EVERY_METHOD
def test_when_all_tasks_are_bad_nothing_changes(method: Callable[[], Method], kind: str) -> None:
    learner = make_learner(method())
    before = complete_state(learner)
    report = learner.step(
        {"touchy": BAD[kind][0], "last": (images(4, 1) * torch.nan, torch.zeros(4, dtype=torch.int64))}
    )
    assert set(report.skipped) == {"touchy", "last"}
    assert (report.losses, report.weights, report.before) == ({}, {}, None)
    after = complete_state(learner)
    assert after["learner"].pop("steps") == before["learner"].pop("steps") + 1
    assert_same(without_counters(after), without_counters(before))
    assert all(p.grad is None for module in learner.model.modules() for p in module.parameters())


@EVERY_METHOD
def test_nothing_ever_becomes_nan(method: Callable[[], Method]) -> None:
    learner = Learner(TinyResNet(), method(), memory=Reservoir(8))
    learner.add_task("a", classes=2)
    learner.add_task("b", head=nn.Linear(8, 1), loss=touchy_loss)
    kinds = [bad for bad, _ in BAD.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(12):
            a = batch(5, 2, step)
            learner.step({"a": (a[0] * torch.nan, a[1]) if step % 5 == 2 else a, "b": kinds[step % len(kinds)]})
    assert (learner.tasks["a"].skipped, learner.tasks["b"].skipped) == (2, 12)
    for module in learner.model.modules():
        for name, value in module.state_dict().items():
            assert value.isfinite().all(), name
    assert all(part.x.isfinite().all() for part in learner.memory.draw(8))


def test_several_bad_tasks_are_all_found_whatever_is_wrong_with_them() -> None:
    learner = make_learner(SORO())
    learner.add_task("other", head=nn.Linear(8, 1), loss=touchy_loss)
    learner.step({"other": (images(9, 1), target(GOOD)), "touchy": (images(9, 1), target(GOOD))})
    touchy, other = BAD["inputs too large"][0], BAD["a NaN gradient"][0]
    report = learner.step({**good_batches(3), "touchy": touchy, "other": other})
    assert set(report.skipped) == {"touchy", "other"}
    assert set(report.losses) == {"first", "last", "memory"}


def test_a_task_skipped_three_times_in_a_row_is_named_once_in_a_warning() -> None:
    learner = make_learner(SORO())
    bad, good = BAD["an infinite loss"][0], (images(9, 5), target(GOOD))

    def warned(pair: tuple[Tensor, Tensor]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner.step({**good_batches(4), "touchy": pair})
        assert all(w.filename == __file__ for w in caught)
        return [str(w.message) for w in caught]

    assert [warned(bad) for _ in range(2)] == [[], []]
    assert warned(good) == []
    assert [warned(bad) for _ in range(2)] == [[], []]
    (message,) = warned(bad)
    assert message.startswith("task 'touchy' was skipped in 3 steps in a row: its loss is inf; ")
    assert warned(bad) == []
    assert (learner.tasks["touchy"].skipped, learner.tasks["touchy"].skipped_in_a_row) == (6, 4)


def test_steps_without_the_task_do_not_break_the_row() -> None:
    learner = make_learner(SORO())
    for _ in range(2):
        learner.step({**good_batches(4), "touchy": BAD["an infinite loss"][0]})
    learner.step(good_batches(4))
    with pytest.warns(RuntimeWarning, match="'touchy' was skipped in 3 steps in a row"):
        learner.step({**good_batches(4), "touchy": BAD["an infinite loss"][0]})


@pytest.mark.parametrize("method", [ER, SORO])
def test_a_faulty_memory_is_skipped_and_reported(method: type[Method]) -> None:
    spoilt = make_learner(method())
    spoilt.memory.buffers["old"].fields["x"].fill_(torch.nan)
    with pytest.warns(RuntimeWarning, match="memory was skipped in a step: its loss is nan"):
        assert spoilt.step(good_batches(3)).skipped == {"memory": "its loss is nan"}
    without = make_learner(method(), memory=False)
    without.step(good_batches(3))
    assert_same(complete_state(spoilt)["backbone"], complete_state(without)["backbone"])


@EVERY_METHOD
def test_a_replay_batch_that_the_model_refuses_is_skipped_and_the_step_made(method: Callable[[], Method]) -> None:
    """Batch-norm refuses to be trained on one sample; which samples are drawn is up to chance."""
    learner = Learner(TinyResNet(), method(), memory=Reservoir(6), memory_batch=2)
    learner.add_task("a", classes=2)
    learner.add_task("b", head=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), loss=mse_loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = [
            learner.step({"a": batch(4, 2, seed), "b": (images(4, seed + 30), torch.zeros(4, 1))}) for seed in range(12)
        ]
    skipped = [report for report in reports if "memory" in report.skipped]
    assert 0 < len(skipped) < 11
    assert all("more than 1 value per channel" in report.skipped["memory"] for report in skipped)
    assert all({"a", "b"} <= set(report.losses) for report in reports)
    assert len(caught) == len(skipped)


class Broken(Method):
    name = "broken"

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.tensor([torch.nan] * len(gradients.names)))


def test_an_update_that_is_not_finite_is_never_taken() -> None:
    learner = make_learner(SORO())
    learner.method = Broken()
    learner._use_engine(EagerEngine(learner.model, learner.method))
    before = complete_state(learner)["backbone"]
    report = learner.step(good_batches(3))
    assert report.skipped == dict.fromkeys(
        ["first", "last"], "the update that Broken() gives for this step is not finite"
    )
    assert_same(complete_state(learner)["backbone"], before)


def test_gradients_too_small_for_float32_weights_do_no_harm() -> None:
    learner = Learner(nn.Linear(4, 4), SORO(scale="unit"), optimizer=partial(torch.optim.SGD, lr=0.1))
    for name in "ab":
        learner.add_task(name, head=nn.Linear(4, 1), loss=lambda output, y: 1e-41 * mse_loss(output, y))
    before = complete_state(learner)["backbone"]
    report = learner.step({name: (images(5, seed)[:, 0, 0], torch.zeros(5, 1)) for seed, name in enumerate("ab")})
    assert report.skipped == dict.fromkeys("ab", "the update that SORO(scale='unit') gives for this step is not finite")
    assert_same(complete_state(learner)["backbone"], before)


class Masked(TinyResNet):
    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), hidden).triu(1))


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e30])
def test_buffers_that_hold_huge_numbers_of_their_own_are_no_fault(hidden: float) -> None:
    learner = Learner(Masked(hidden), SORO())
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=2)
    report = learner.step({"a": batch(5, 2, 0), "b": batch(5, 2, 1)})
    assert set(report.losses) == {"a", "b"}


class Nudge(Method):
    """Adds the look-ahead loss, turned into ones, to rehearsal samples: what is edited shows how often."""

    name = "nudge"
    edits_memory = True

    def edit(self, rehearsals: Sequence[ReplayBatch], model: LookAhead) -> list[Tensor]:
        inputs = [part.x for part in rehearsals]
        with model.ahead(0.1), torch.no_grad():
            loss = model.loss(inputs)
        return [x + loss / loss for x in inputs]

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.ones(len(gradients.names)))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", ["NaN inputs", "a NaN gradient", "inputs too large"])
def test_edits_of_memory_are_made_once_and_stay_clean(kind: str, reduction: str) -> None:
    method = type("NudgeReduced", (Nudge,), {"reduction": reduction})()
    learner = make_learner(method)
    before = learner.memory.buffers["old"].take("x")
    learner.step({**good_batches(3), "touchy": BAD[kind][0]})
    assert torch.equal(learner.memory.buffers["old"].take("x"), before + 1)


# -- a step that raises


@EVERY_METHOD
def test_a_loss_that_raises_is_named_and_nothing_has_changed(method: Callable[[], Method]) -> None:
    learner = make_learner(method())
    before = complete_state(learner)
    with pytest.raises(TaskError, match=r"task 'touchy': .* 9 samples of float32\[2, 4, 4\] .*: a target of 4"):
        learner.step({**good_batches(3), "touchy": (images(9, 5), target(RAISES))})
    assert_same(complete_state(learner), before)


def test_a_failed_first_step_makes_no_difference() -> None:
    states = []
    for sizes in ((1, 4), (4,)):
        torch.manual_seed(0)
        learner = Learner(nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)), SORO())
        learner.add_task("a", classes=2)
        learner.add_task("b", classes=2)
        for size in sizes:
            with pytest.raises(TaskError, match=r"task 'b'.* more than 1 value") if size == 1 else nullcontext():
                learner.step({"a": batch(4, 2, 0), "b": batch(size, 2, 1)})
        states.append(complete_state(learner))
    assert_same(*states)


def test_a_method_that_raises_after_the_weighting_has_changed_nothing() -> None:
    class Raising(DWA):
        def after_step(self, losses: Mapping[str, float]) -> None:
            super().after_step(losses)
            if MEMORY in losses:
                raise RuntimeError("no more")

    learner = make_learner(Raising())
    before = complete_state(learner)
    with pytest.raises(RuntimeError, match="no more"):
        learner.step({**good_batches(3), "touchy": (images(9, 5), target(GOOD))})
    assert_same(complete_state(learner), before)


def test_an_interrupted_step_has_not_happened() -> None:
    learner = make_learner(SORO())
    before = complete_state(learner)
    with pytest.raises(KeyboardInterrupt):
        learner.step({**good_batches(3), "touchy": (images(9, 5), target(INTERRUPTS))})
    assert_same(complete_state(learner), before)


def test_a_batch_too_small_for_batch_norm_is_named_and_nothing_has_changed() -> None:
    learner = make_learner(SORO())
    before = complete_state(learner)
    with pytest.raises(TaskError, match=r"task 'touchy': the model raised an error on 1 samples .*more than 1 value"):
        learner.step({**good_batches(3), "touchy": (images(1, 5), target(GOOD, 1))})
    assert_same(complete_state(learner), before)


@pytest.mark.parametrize("call", [1, 3], ids=["in a task", "in memory"])
def test_a_full_gpu_ends_the_step_and_is_blamed_on_nobody(call: int) -> None:
    learner, calls = make_learner(SORO()), []
    learner._engine.one_pass = None  # a pass over all batches would be repeated so
    before = complete_state(learner)

    def full(*_: object) -> None:
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    hook = learner.model.backbone.register_forward_pre_hook(full)
    with pytest.raises(RuntimeError, match=r"^CUDA error: CUBLAS_STATUS_ALLOC_FAILED"):
        learner.step(good_batches(3))
    hook.remove()
    assert_same(complete_state(learner), before)


class Replacing(TinyResNet):
    """Keeps its running mean not in place but in a new tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return super().forward(x - self.mean)


@pytest.mark.parametrize("captured", [False, True])
def test_a_buffer_that_is_replaced_is_set_back_too(captured: bool) -> None:
    learners = [Learner(Replacing(), SORO()) for _ in range(2)]
    for learner in learners:
        if captured:
            capture_without_graphs(learner)
        learner.add_task("a", classes=3)
        learner.add_task("b", classes=2)
        learner.step({"a": batch(6, 3, 0), "b": batch(4, 2, 1)})
    tried, spared = learners
    report = tried.step({"a": batch(6, 3, 2), "b": (images(4, 3) * torch.nan, torch.arange(4) % 2)})
    assert list(report.skipped) == ["b"]
    spared.step({"a": batch(6, 3, 2)})
    assert_same(without_counters(complete_state(tried)), without_counters(complete_state(spared)))
