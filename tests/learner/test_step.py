"""A step: gradients, weights and updates by hand, and what is skipped and undone when numbers are not finite."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchjd.aggregation import PCGradWeighting

from _by_hand import (
    RATE,
    ByHand,
    assert_equals_by_hand,
    batches,
    er_by_hand,
    present,
    soro_by_hand,
    trained_learner,
)
from _learning import (
    Agreement,
    PlainMoment,
    Preferences,
    TinyResNet,
    assert_same,
    batch,
    capture_without_graphs,
    complete_state,
    images,
)
from spcl.engine import EagerEngine
from spcl.errors import TaskError
from spcl.learner import Learner, StepReport
from spcl.memory import BalancedCoreset, ReplayBatch, Reservoir
from spcl.methods import DWA, ER, GMED, MEMORY, SORO, SORODBT, Gradients, LookAhead, Method, Weights, make_method

SCENARIOS = pytest.mark.parametrize("scenario", ["task", "class"])
WITH_MEMORY = pytest.mark.parametrize("memory", [False, True], ids=["no memory", "memory"])


@SCENARIOS
@WITH_MEMORY
@pytest.mark.parametrize(
    ("method", "combine", "alpha"),
    [
        (ER, er_by_hand, 0.0),
        (partial(ER, alpha=0.01), er_by_hand, 0.01),
        (SORO, soro_by_hand, 0.0),
        (partial(SORO, scale="unit"), partial(soro_by_hand, scale="unit"), 0.0),
        (partial(SORODBT, alpha=0.01), soro_by_hand, 0.01),
    ],
    ids=["er", "er+dbt", "soro", "soro of unit scale", "soro+dbt"],
)
def test_a_step_is_what_autograd_gives_by_hand(
    method: Callable[[], Method], combine: Callable[[Tensor, bool], Tensor], alpha: float, scenario: str, memory: bool
) -> None:
    learner = trained_learner(method(), scenario, memory)
    for seed in range(2, 5):
        reference = ByHand(learner)
        report = learner.step(present(learner, seed))
        reference.step(present(learner, seed), combine, alpha)
        assert list(report.losses) == [*present(learner, seed), *(["memory"] if memory else [])]
        assert_equals_by_hand(learner, reference)


@SCENARIOS
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "no memory"])
def test_a_step_of_pcgrad_is_what_torchjd_gives_for_the_same_seed(scenario: str, memory: bool) -> None:
    learner = trained_learner(make_method("pcgrad"), scenario, memory)
    conflicts = 0
    for seed in range(2, 5):
        reference = ByHand(learner)
        torch.manual_seed(seed)
        report = learner.step(present(learner, seed))
        torch.manual_seed(seed)
        reference.step(present(learner, seed), pcgrad_by_torchjd)
        assert_equals_by_hand(learner, reference)
        conflicts += report.before.conflicts
    assert conflicts


def pcgrad_by_torchjd(rows: Tensor, with_memory: bool) -> Tensor:
    return PCGradWeighting()(rows @ rows.T) @ rows


class LossWeighted(Method):
    """The mean of the tasks and the memory, weighed by their losses."""

    name = "loss-weighted"
    reduction = "mean"
    uses_gramian = False

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.from_numpy(gradients.losses))


class GramianWeighted(LossWeighted):
    name = "gramian-weighted"
    uses_gramian = True

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(gradients.known_gramian().sum(dim=0).sigmoid())


SETTINGS = [{}, {"alpha": 0.01}, {"alpha": 0.01, "decoupled": True}, {"alpha": 0.1, "adaptive": True}]
LEAN = [ER, Preferences, LossWeighted, GramianWeighted]


@WITH_MEMORY
@pytest.mark.parametrize("broken", ["none", "first", "last"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "alpha", "decoupled", "adaptive"])
@pytest.mark.parametrize("method", LEAN)
def test_a_reduction_gives_the_update_of_the_full_matrix(
    method: type[Method], settings: dict[str, float], broken: str, memory: bool
) -> None:
    lean, full = (trained_learner(method(**settings), memory=memory, measure_stability=full) for full in (False, True))
    given = present(lean, 2)
    if broken != "none":
        name = list(given)[0 if broken == "first" else -1]
        given[name] = (given[name][0] * torch.nan, given[name][1])
    reports = [learner.step(given) for learner in (lean, full)]
    for module, other in zip(lean.model.modules(), full.model.modules(), strict=True):
        torch.testing.assert_close(dict(module.state_dict()), dict(other.state_dict()), rtol=1e-10, atol=1e-10)
    assert reports[0].losses == pytest.approx(reports[1].losses, rel=1e-10)
    assert reports[0].weights == pytest.approx(reports[1].weights, rel=1e-10)
    assert list(reports[0].skipped) == list(reports[1].skipped) == ([] if broken == "none" else [name])
    assert reports[0].before is None
    assert reports[1].before is not None


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "alpha", "decoupled", "adaptive"])
@pytest.mark.parametrize("method", [*LEAN, SORO, Agreement])
def test_the_orthogonality_gradient_enters_as_asked(method: type[Method], settings: dict[str, float]) -> None:
    learner = trained_learner(method(**settings))
    reference = ByHand(learner)
    rule, chosen = copy.deepcopy(learner.method), learner.method.settings
    weights = list(reference.backbone.parameters())
    shared = reference.orthogonality_gradient(weights)

    def combine(rows: Tensor, with_memory: bool) -> Tensor:
        names = ("current", "memory") if rule.reduction == "mean" else ("b", "c", "memory")
        losses = np.array([report.losses[name] for name in ("b", "c", "memory")])
        if rule.reduction == "mean":
            rows = torch.stack([rows[:-1].mean(dim=0), rows[-1]])
            losses = np.array([losses[:-1].mean(), losses[-1]])
        columns = Gradients(names, losses, rows @ rows.T)
        update = rule.combine(rows) if rule.elementwise else rule.weigh(columns).values.double() @ rows
        return update if chosen.coupled else update + penalty(update)

    def penalty(update: Tensor) -> Tensor:
        if not chosen.adaptive:
            return chosen.alpha * shared
        sizes = [weight.numel() for weight in weights]
        parts = zip(weights, update.split(sizes), shared.split(sizes), strict=True)
        return torch.cat([chosen.alpha * u.norm() / max(p.norm(), w.norm()) * p for w, u, p in parts])

    report = learner.step(present(learner, 2))
    reference.step(present(learner, 2), combine, chosen.alpha if chosen.coupled else 0.0)
    assert_equals_by_hand(learner, reference)


def test_a_regression_head_beside_classifiers_gets_its_own_gradient() -> None:
    learner = trained_learner(SORO(), memory=False)
    head = nn.Linear(8, 2).double()
    learner.add_task("speed", head=head, loss=mse_loss)
    x, y = batch(5, 2, 40, torch.float64)[0], torch.ones(5, 2, dtype=torch.float64)
    expected = torch.autograd.grad(mse_loss(head(copy.deepcopy(learner.model.backbone)(x)), y), head.weight)[0]
    before = head.weight.detach().clone()
    learner.step(batches(2) | {"speed": (x, y)})
    torch.testing.assert_close(head.weight.detach(), before - RATE * expected, rtol=1e-9, atol=1e-12)


# -- what is reported


def test_the_report_says_what_the_step_did() -> None:
    learner = trained_learner(SORO())
    reference = ByHand(learner)
    seen: list[Tensor] = []

    def combine(rows: Tensor, with_memory: bool) -> Tensor:
        seen.append(rows)
        return soro_by_hand(rows, with_memory)

    report = learner.step(present(learner, 2))
    reference.step(present(learner, 2), combine)
    (rows,) = seen
    columns = ["b", "c", "memory"]
    assert report.step == 2
    assert list(report.losses) == list(report.weights) == columns
    assert report.skipped == {}
    update = torch.tensor(list(report.weights.values()), dtype=torch.float64) @ rows
    torch.testing.assert_close(update, soro_by_hand(rows, True), rtol=1e-9, atol=1e-12)
    singular = torch.linalg.svdvals(rows)
    assert report.before.condition_number == pytest.approx(float(singular[0] / singular[-1]), rel=1e-8)
    cosines = nn.functional.normalize(rows, dim=1) @ nn.functional.normalize(rows, dim=1).T
    torch.testing.assert_close(report.before.cosines, cosines, rtol=1e-9, atol=1e-9)
    assert report.before.conflicts == int((cosines.triu(1) < 0).sum())
    norms = rows.norm(dim=1)
    similarities = 2 * torch.outer(norms, norms) / (norms[:, None] ** 2 + norms[None, :] ** 2)
    torch.testing.assert_close(report.before.magnitude_similarities, similarities)
    assert report.after.condition_number < report.before.condition_number
    assert report.after.mean_magnitude_similarity > 0.99
    assert set(report.seconds) == {"tasks", "memory", "weighting", "update"}
    assert all(seconds >= 0 for seconds in report.seconds.values())
    assert report.memory_bytes == learner.memory.nbytes > 0


def test_a_report_holds_and_needs_nothing_larger_than_the_gramian() -> None:
    learner = trained_learner(SORODBT())
    report = learner.step(present(learner, 2))
    assert "orthogonality" in report.seconds
    for stability in (report.before, report.after):
        assert stability.gramian.shape == (3, 3)
        assert stability.gramian.untyped_storage().nbytes() == 9 * 8


@pytest.mark.parametrize("method", [SORO(), ER(), make_method("rlw")])  # one of every reduction
def test_what_is_to_be_done_meanwhile_is_done_once_and_before_the_update(method: Method) -> None:
    torch.manual_seed(0)
    backbone = nn.Linear(4, 3)
    learner = Learner(backbone, method)
    for name in ("good", "bad"):
        learner.add_task(name, classes=2)
    seen: list[Tensor] = []
    x, y = torch.randn(6, 4), torch.arange(6) % 2
    before = backbone.weight.detach().clone()
    reports: list[StepReport] = []
    moment = PlainMoment({"good": (x, y), "bad": (x * torch.nan, y)})
    learner.fit([moment], on_step=reports.append, meanwhile=lambda: seen.append(backbone.weight.clone()))
    assert list(reports[0].skipped) == ["bad"]
    assert len(seen) == 1
    assert torch.equal(seen[0], before)
    assert not torch.equal(backbone.weight, before)
    with pytest.raises(ZeroDivisionError):
        learner.fit([PlainMoment({"good": (x, y)})], meanwhile=lambda: 1 // 0)
    assert learner.steps == 1


def test_a_method_without_gramian_is_measured_only_on_request() -> None:
    assert trained_learner(ER(), memory=False).step(batches(2)).before is None
    report = trained_learner(ER(), memory=False, measure_stability=True).step(batches(2))
    assert report.before.condition_number == pytest.approx(report.after.condition_number)  # all weights are equal
    assert report.after.gramian.shape == (3, 3)


# -- how much memory


@pytest.mark.parametrize(
    ("method", "memory", "rows"),
    [
        (ER(), False, 1),
        (ER(), True, 2),
        (ER(alpha=0.1), True, 3),
        (Preferences(), True, 2),
        (SORO(), False, 3),
        (SORO(), True, 3),
        (SORODBT(), False, 4),
    ],
    ids=str,
)
def test_the_gradient_buffer_has_no_more_rows_than_needed(method: Method, memory: bool, rows: int) -> None:
    learner = trained_learner(method, memory=memory)
    learner.step(present(learner, 2))
    length = sum(parameter.numel() for parameter in learner.model.backbone.parameters())
    buffer = learner._engine.gradients.buffer
    assert buffer.shape == (rows, length)
    for parameter in learner.model.backbone.parameters():
        assert parameter.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_bad_batches_cost_no_further_rows() -> None:
    learner = trained_learner(SORO(), memory=False)
    given = batches(2)
    given["b"] = (given["b"][0] * torch.nan, given["b"][1])
    learner.step(given)
    assert len(learner._engine.gradients.buffer) == 3


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
    assert (learner.sources["touchy"].skipped, learner.sources["touchy"].skipped_in_a_row) == (1, 1)
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
    assert (learner.sources["touchy"].skipped, learner.sources["touchy"].skipped_in_a_row) == (6, 4)


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


def test_memory_and_a_task_that_are_faulty_at_once_are_both_skipped() -> None:
    learner = Learner(TinyResNet(), GMED(), memory=Reservoir(6, dtype=torch.float32), memory_batch=1)
    learner.add_task("b", head=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), loss=mse_loss)
    learner.step({"b": (images(4, 30), torch.zeros(4, 1))})
    for name in ("a", "c"):
        learner.add_task(name, classes=2)
    learner.measure_stability = True
    before = learner.memory.seen
    broken = batch(4, 2, 1)[0] * torch.nan, batch(4, 2, 1)[1]
    with pytest.warns(RuntimeWarning, match="memory was skipped in a step"):
        report = learner.step({"a": broken, "b": (images(4, 31), torch.zeros(4, 1)), "c": batch(4, 2, 2)})
    assert report.skipped.keys() == {"memory", "a"}
    assert report.losses.keys() == {"b", "c"}
    assert learner.memory.seen == before + 8


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
