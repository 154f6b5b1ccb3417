"""Class-incremental losses of new samples over the classes of running tasks, against autograd and by properties."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

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
from spcl.learner import Learner, Scenario
from spcl.losses import CrossEntropy
from spcl.memory import BalancedCoreset
from spcl.methods import ER, MDMTR, METHODS, SORO, Method, make_method
from spcl.methods.tasks import Output, Task

RUNNING = range(CLASSES["a"], sum(CLASSES.values()))
"""The classes of b and c; task a is finished."""


def loss_over_running(learner: Learner, task: str) -> Tensor:
    x, y = BATCHES[task]
    joint = logits(learner, task, x, joint=True)
    return cross_entropy(joint[:, RUNNING.start :], labels(learner, task, y, joint=True) - RUNNING.start)


@pytest.mark.usefixtures("double")
@policies
def test_new_samples_are_told_apart_from_running_tasks_and_replayed_ones_from_all(policy: Any) -> None:
    learner = learner_with(ER(loss_classes="active"), "class", policy(10))
    learner.step(BATCHES)
    drawn = deepcopy(learner.memory).draw(4)  # type: ignore[union-attr]
    current = torch.stack([loss_over_running(learner, task) for task in BATCHES]).mean()
    expected = shared_gradient(learner, (current + replay_loss(learner, drawn, joint=True)) / 2)
    torch.testing.assert_close(step_taken(learner, BATCHES), expected)


@pytest.mark.usefixtures("double")
def test_the_margins_of_mdmtr_are_within_the_running_tasks() -> None:
    learner = learner_with(MDMTR(loss_classes="active"), "class", BalancedCoreset(10))
    learner.step(BATCHES)
    (x, y), mdmtr = BATCHES["b"], learner.method
    cosines = logits(learner, "b", x, joint=True)
    expected = mdmtr.task_loss(Output(learner.tasks["b"], cosines[:, 2:], y, slice(0, 3)))
    found = mdmtr.task_loss(Output(learner.tasks["b"], cosines, y + 2, slice(2, 5), covered=tuple(RUNNING)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_head_of_a_finished_task_learns_from_memory_alone(name: str) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    for loss_classes, stays in (("active", True), ("seen", False)):
        method = make_method(name, loss_classes=loss_classes)
        learner = Learner(nn.Linear(4, 3), method, optimizer=sgd, scenario="class")
        learner.add_task("a", classes=2)
        learner.step({"a": _single(batch("a", 0))})
        learner.finish_task("a")
        learner.add_task("b", classes=3)
        before = deepcopy(learner.tasks["a"].head)
        learner.step({"b": _single(batch("b", 1))})
        assert before is not None
        assert _same(before, learner.tasks["a"].head) == stays


@pytest.mark.parametrize("method", [ER, SORO])
def test_task_incrementally_nothing_changes(method: type[Method]) -> None:
    assert _losses(method(loss_classes="active"), "task") == _losses(method(loss_classes="seen"), "task")


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("name", ["er", "spcl", "mdmtr", "gmed", "torchjd:UPGrad"])
def test_a_run_is_resumed_exactly(name: str, scenario: Scenario, tmp_path: Path) -> None:
    make = partial(method_runs.new_learner, make_method(name, loss_classes="active"), scenario)
    straight = make()
    method_runs.run(straight, 0)
    resumed = method_runs.paused(make, 5, tmp_path / "learner")
    for mine, theirs in zip(resumed.model.modules(), straight.model.modules(), strict=True):
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("loss", [cross_entropy, CrossEntropy(0.3), CrossEntropy(0.3, (1.0, 5.0))])
@pytest.mark.parametrize("as_probabilities", [False, True])
def test_smoothing_and_class_weights_are_those_of_the_covered_classes(loss: Any, as_probabilities: bool) -> None:
    torch.manual_seed(0)
    values, y, covered = torch.randn(8, 7, dtype=torch.float64), torch.arange(8) % 2, (0, 3, 4, 6)

    def targets(first: int, classes: int) -> Tensor:
        return one_hot(y + first, classes).double() if as_probabilities else y + first

    task = Task("b", 2, loss, None, offset=3)
    found = Output(task, values, targets(3, 7), slice(3, 5), covered=covered).loss()
    expected = Output(task, values[:, covered], targets(1, 4), slice(1, 3)).loss()
    torch.testing.assert_close(found, expected)
    assert found.isfinite()


def test_before_a_task_is_finished_all_classes_are_covered() -> None:
    active, seen = (_losses(ER(loss_classes=classes), "class") for classes in ("active", "seen"))
    first_end = method_runs.SPANS["a"][1] + 1
    assert active[:first_end] == seen[:first_end]
    assert active[first_end] != seen[first_end]


def _losses(method: Method, scenario: Scenario) -> list[dict[str, float]]:
    learner = method_runs.new_learner(method, scenario)
    return [report.losses for report in method_runs.run(learner, 0)]


def _single(samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return samples[0].float(), samples[1]


def _same(before: nn.Module, after: nn.Module | None) -> bool:
    assert after is not None
    return all(torch.equal(one, other) for one, other in zip(before.parameters(), after.parameters(), strict=True))
