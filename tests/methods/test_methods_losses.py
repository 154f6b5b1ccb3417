"""DER++ and MDMTR, which change losses, against autograd on tiny networks."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from replay_steps import (
    BATCHES,
    CLASSES,
    current_loss,
    learner_with,
    logits,
    policies,
    replay_loss,
    scenarios,
    shared_gradient,
    step_taken,
)
from spcl.errors import TaskError
from spcl.learner import Learner, Scenario
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import DERPP, MDMTR, CosineHead

pytestmark = pytest.mark.usefixtures("double")


# -- DER++


@scenarios
@policies
def test_derpp_adds_distance_to_stored_logits_and_replayed_labels(scenario: Scenario, policy: Any) -> None:
    learner = learner_with(DERPP(logit_weight=0.3, label_weight=0.7), scenario, policy(10))
    joint = scenario == "class"
    learner.step(BATCHES)
    memory = deepcopy(learner.memory)
    assert memory is not None
    first, second = memory.draw(4), memory.draw(4)
    distances = []
    for part in first:
        assert part.logits is not None
        for row, (z, stored) in enumerate(zip(logits(learner, part.source, part.x, joint), part.logits, strict=True)):
            known = [k for k, value in enumerate(stored.tolist()) if value == value]
            assert known, (part.source, row)
            distances.append(mse_loss(z[known], stored[known]))
    loss = current_loss(learner, BATCHES, joint) + 0.3 * torch.stack(distances).mean()
    loss = loss + 0.7 * replay_loss(learner, second, joint)
    expected = shared_gradient(learner, loss)
    torch.testing.assert_close(step_taken(learner, BATCHES), expected)


def test_derpp_stores_the_logits_of_the_moment() -> None:
    """A reservoir's samples carry the logits they had when observed, with NaN for classes that came later."""
    learner = learner_with(DERPP(), "class", Reservoir(100))
    x, _ = BATCHES["b"]
    expected = logits(learner, "b", x, joint=True).detach()
    learner.step(BATCHES)
    assert learner.memory is not None
    parts = {part.source: part for part in learner.memory.draw(100)}
    stored = parts["b"].logits
    assert stored is not None
    rows = [int((parts["b"].x == sample).all(dim=1).nonzero()) for sample in x]
    torch.testing.assert_close(stored[rows], expected)
    early = parts["a"].logits
    assert early is not None
    assert early[:, :2].isfinite().all()
    assert early[:, 2:].isnan().any()


def test_derpp_replays_a_task_with_a_head_of_its_own() -> None:
    torch.manual_seed(0)
    learner = Learner(nn.Linear(4, 3), DERPP(), memory=Reservoir(20))
    learner.add_task("speed", head=nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), loss=mse_loss)
    x = torch.randn(6, 4)
    report = [learner.step({"speed": (x, x[:, 0])}) for _ in range(30)]
    assert report[-1].losses["speed"] < report[0].losses["speed"]
    assert "memory" in report[1].losses


# -- MDMTR


def margin_loss(learner: Learner, task: str, x: Tensor, y: Tensor, s: float, m_t: float, m_c: float) -> Tensor:
    """The two-level angular margin loss sample by sample and class by class, from the angles."""
    features = learner.model.backbone(x)
    vectors = torch.cat([learner.tasks[name].head.weight for name in learner.tasks])  # type: ignore[union-attr,misc]
    own = range(learner.tasks[task].offset, learner.tasks[task].offset + CLASSES[task])
    losses = []
    for f, label in zip(features, y.tolist(), strict=True):
        angles = [torch.acos(f @ v / (f.norm() * v.norm())) for v in vectors]
        target = learner.tasks[task].offset + label
        scores = torch.stack(
            [s * torch.cos(angle + m_t * (k in own) + m_c * (k == target)) for k, angle in enumerate(angles)]
        )
        losses.append(scores.logsumexp(dim=0) - scores[target])
    return torch.stack(losses)


@scenarios
def test_mdmtr_trains_by_the_two_level_margin_loss(scenario: Scenario) -> None:
    learner = learner_with(MDMTR(scale=7.0, task_margin=0.3, class_margin=0.2), scenario, BalancedCoreset(8))
    learner.step(BATCHES)
    memory = deepcopy(learner.memory)
    assert memory is not None
    drawn = memory.draw(4)
    tasks = [margin_loss(learner, task, x, y, 7.0, 0.3, 0.2).mean() for task, (x, y) in BATCHES.items()]
    replayed = torch.cat([margin_loss(learner, part.source, part.x, part.y, 7.0, 0.3, 0.2) for part in drawn]).mean()
    expected = shared_gradient(learner, (torch.stack(tasks).mean() + replayed) / 2)
    torch.testing.assert_close(step_taken(learner, BATCHES), expected)


def test_mdmtr_without_margins_is_a_scaled_cosine_softmax() -> None:
    learner = learner_with(MDMTR(task_margin=0.0, class_margin=0.0), "class", BalancedCoreset(8))
    x, y = BATCHES["b"]
    expected = cross_entropy(20.0 * logits(learner, "b", x, joint=True), y + 2)
    assert learner.step(BATCHES).losses["b"] == pytest.approx(expected.item())


def test_mdmtr_margins_make_the_loss_harder() -> None:
    def loss(**margins: float) -> float:
        return learner_with(MDMTR(**margins), "task", BalancedCoreset(8)).step(BATCHES).losses["b"]

    none, task, both = (
        loss(task_margin=0.0, class_margin=0.0),
        loss(task_margin=0.2, class_margin=0.0),
        loss(task_margin=0.2, class_margin=0.2),
    )
    assert none < task < both


def test_mdmtr_has_finite_gradients_where_angles_are_0_or_pi() -> None:
    learner = learner_with(MDMTR(), "task", BalancedCoreset(8))
    head = learner.tasks["b"].head
    assert isinstance(head, CosineHead)
    x, y = BATCHES["b"]
    with torch.no_grad():
        features = learner.model.backbone(x)
        head.weight[0], head.weight[1] = features[0], -features[0]
    report = learner.step({"b": (x, y)})
    assert not report.skipped
    assert all(bool(parameter.isfinite().all()) for parameter in learner.model.backbone.parameters())


def test_mdmtr_rejects_a_task_with_a_head_of_its_own_and_changes_nothing() -> None:
    learner = learner_with(MDMTR(), "task", BalancedCoreset(8))
    learner.add_task("speed", head=nn.Linear(5, 1), loss=mse_loss)
    x, y = BATCHES["b"]
    before = deepcopy(learner.model.backbone.state_dict())
    with pytest.raises(TaskError, match="task 'speed' has a head and loss of its own, but method 'mdmtr'"):
        learner.step({"b": (x, y), "speed": (x, x[:, :1])})
    torch.testing.assert_close(learner.model.backbone.state_dict(), before, rtol=0, atol=0)
    assert "b" in learner.step({"b": (x, y)}).losses
