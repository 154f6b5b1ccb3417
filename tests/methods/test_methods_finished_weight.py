"""The weight of finished classes in the class-incremental loss of new samples, against autograd and by properties."""

import math
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

import method_runs
from replay_steps import (
    BATCHES,
    CLASSES,
    batch,
    labels,
    learner_with,
    logits,
    policies,
    replay_loss,
    shared_gradient,
    step_taken,
)
from spcl.engine.model import Samples
from spcl.errors import SpclError
from spcl.learner import Learner, Scenario
from spcl.losses import CrossEntropy
from spcl.memory import BalancedCoreset
from spcl.methods import ER, MDMTR, METHODS, SORO, Method, make_method

WEIGHT = 0.05


def weighted_cross_entropy(values: Tensor, y: Tensor, finished: slice) -> Tensor:
    """The definition: finished classes count by the weight in the denominator, and by 1 in the numerator."""
    exponentials = values.exp()
    denominator = exponentials.sum(dim=1) - (1.0 - WEIGHT) * exponentials[:, finished].sum(dim=1)
    return (denominator.log() - values.gather(1, y.unsqueeze(1)).squeeze(1)).mean()


def loss_of_new_samples(learner: Learner, task: str) -> Tensor:
    x, y = BATCHES[task]
    joint = logits(learner, task, x, joint=True)
    return weighted_cross_entropy(joint, labels(learner, task, y, joint=True), slice(0, CLASSES["a"]))


@pytest.mark.usefixtures("double")
@policies
def test_finished_classes_count_less_for_new_samples_and_fully_for_replayed_ones(policy: Any) -> None:
    learner = learner_with(ER(finished_weight=WEIGHT), "class", policy(10))
    learner.step(BATCHES)
    drawn = deepcopy(learner.memory).draw(4)  # type: ignore[union-attr]
    current = torch.stack([loss_of_new_samples(learner, task) for task in BATCHES]).mean()
    expected = shared_gradient(learner, (current + replay_loss(learner, drawn, joint=True)) / 2)
    torch.testing.assert_close(step_taken(learner, BATCHES), expected)


@pytest.mark.usefixtures("double")
def test_the_scaled_cosines_of_mdmtr_are_weighted_alike() -> None:
    mdmtr = MDMTR(finished_weight=WEIGHT, task_margin=0.0, class_margin=0.0)
    learner = learner_with(mdmtr, "class", BalancedCoreset(9))
    learner.step(BATCHES)
    x, y = BATCHES["b"]
    cosines = logits(learner, "b", x, joint=True)
    (output,) = learner.model.outputs([Samples(learner.sources["b"], x, y)])
    torch.testing.assert_close(mdmtr.task_loss(output), weighted_cross_entropy(20.0 * cosines, y + 2, slice(0, 2)))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_heads_of_finished_tasks_are_pushed_less_by_new_samples(name: str) -> None:
    moved = [_change_of_finished_head(make_method(name, finished_weight=weight)) for weight in (1e-9, 0.1, 1.0)]
    assert moved[0] < 1e-6 < moved[1] < moved[2]


def _change_of_finished_head(method: Method) -> float:
    torch.manual_seed(0)
    learner = learner_after_a(method)
    before = deepcopy(learner.model.head(learner.tasks["a"]))
    learner.step({"b": _single(batch("b", 1))})
    after = learner.model.head(learner.tasks["a"])
    changes = [one - other for one, other in zip(before.parameters(), after.parameters(), strict=True)]
    return float(torch.cat([change.detach().flatten() for change in changes]).norm())


@pytest.mark.parametrize("method", [ER, SORO, MDMTR])  # the last compares the classes of all tasks
def test_task_incrementally_nothing_changes(method: type[Method]) -> None:
    assert _losses(method(finished_weight=WEIGHT), "task") == _losses(method(), "task")


@pytest.mark.parametrize("name", ["er", "spcl", "mdmtr", "gmed", "torchjd:UPGrad"])
def test_a_run_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    make = partial(method_runs.new_learner, make_method(name, finished_weight=WEIGHT), "class")
    straight = make()
    method_runs.run(straight, 0)
    resumed = method_runs.paused(make, 5, tmp_path / "learner")
    for mine, theirs in zip(resumed.model.modules(), straight.model.modules(), strict=True):
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_before_a_task_is_finished_all_classes_count_alike() -> None:
    weighted, plain = (_losses(ER(finished_weight=weight), "class") for weight in (WEIGHT, 1.0))
    end = method_runs.SPANS["a"][1] + 1
    assert weighted[:end] == plain[:end]
    assert weighted[end]["b"] < plain[end]["b"]


def learner_after_a(method: Method, **options: Any) -> Learner:
    """Return a learner that has finished task a and begins b, with these options of the task."""
    learner = Learner(nn.Linear(4, 3), method, optimizer=partial(torch.optim.SGD, lr=0.1), scenario="class")
    learner.add_task("a", classes=2)
    learner.step({"a": _single(batch("a", 0))})
    learner.finish_task("a")
    learner.add_task("b", classes=3, **options)
    return learner


def test_losses_of_another_kind_get_the_logits_themselves() -> None:
    def squares(values: Tensor, y: Tensor) -> Tensor:
        return mse_loss(values, one_hot(y, values.shape[1]).float())

    x, y = _single(batch("b", 1))
    learner = learner_after_a(ER(finished_weight=WEIGHT), loss=squares)
    expected = squares(logits(learner, "b", x, joint=True), y + 2).item()
    assert learner.step({"b": (x, y)}).losses["b"] == pytest.approx(expected)


def test_a_head_of_a_tasks_own_is_trained_by_its_own_classes() -> None:
    learner = learner_after_a(ER(finished_weight=WEIGHT))
    (x, y), head = _single(batch("b", 1)), nn.Linear(3, 3)
    learner.add_task("c", head=head, loss=cross_entropy)
    expected = cross_entropy(head(learner.model.backbone(x)), y).item()
    assert learner.step({"b": (x, y), "c": (x, y)}).losses["c"] == pytest.approx(expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weights", [None, (1.0, 5.0, 2.0)])
@pytest.mark.parametrize("as_probabilities", [False, True])
def test_smoothing_is_spread_by_the_weights_of_the_classes(
    smoothing: float, weights: tuple[float, ...] | None, as_probabilities: bool
) -> None:
    """Against the definition of cross-entropy, sample by sample and class by class."""
    torch.manual_seed(0)
    values, y = torch.randn(8, 5, dtype=torch.float64), 2 + torch.arange(8) % 3
    offsets = torch.tensor([math.log(WEIGHT), math.log(WEIGHT), 0.0, 0.0, 0.0], dtype=torch.float64)
    targets = one_hot(y, 5).double() * 0.9 + 0.02 if as_probabilities else y
    found = CrossEntropy(smoothing, weights)(values, targets, slice(2, 5), offsets)
    of_classes, shares = [1.0, 1.0, *(weights or (1.0, 1.0, 1.0))], [WEIGHT, WEIGHT, 1.0, 1.0, 1.0]
    total, counted = 0.0, 0.0
    for row, label, target in zip(values, y, targets, strict=True):
        denominator = sum(share * math.exp(value) for share, value in zip(shares, row, strict=True))
        for place in range(5):
            wanted = float(target[place]) if as_probabilities else float(place == label)
            wanted = (1.0 - smoothing) * wanted + smoothing * shares[place] / sum(shares)
            total -= of_classes[place] * wanted * math.log(shares[place] * math.exp(row[place]) / denominator)
        counted += 1.0 if as_probabilities else of_classes[label]
    assert float(found) == pytest.approx(total / counted)


def test_with_smoothing_new_samples_do_not_raise_the_logits_of_finished_classes() -> None:
    learner = learner_after_a(ER(finished_weight=0.01), loss=CrossEntropy(0.1))
    x, y = _single(batch("b", 1, 30))
    for _ in range(300):
        learner.step({"b": (x + 6.0 * one_hot(y, 4), y)})
    assert (learner.predict(x + 6.0 * one_hot(y, 4)) == y + 2).float().mean() > 0.9


@pytest.mark.parametrize("weight", [0.0, -0.5, 1.5])
def test_weights_outside_of_0_to_1_are_refused(weight: float) -> None:
    with pytest.raises(SpclError, match=f"finished_weight = {weight}"):
        ER(finished_weight=weight)


def _losses(method: Method, scenario: Scenario) -> list[dict[str, float]]:
    learner = method_runs.new_learner(method, scenario)
    return [report.losses for report in method_runs.run(learner, 0)]


def _single(samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return samples[0].float(), samples[1]
