"""Losses on replayed samples, combined with any weighting, against autograd and against the methods they come from."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import method_runs
from replay_steps import (
    BATCHES,
    current_loss,
    learner_with,
    logits,
    policies,
    replay_loss,
    scenarios,
    shared_gradient,
    step_taken,
)
from spcl.engine.model import Samples
from spcl.errors import SpclError
from spcl.learner import Learner, Scenario
from spcl.memory import BalancedCoreset
from spcl.methods import ER, GMED, SORO, Method, make_method
from spcl.results.records import RunRecord, find_variants


@pytest.mark.usefixtures("double")
@scenarios
@policies
def test_stored_logits_are_trained_on_the_samples_whose_labels_are(scenario: Scenario, policy: Any) -> None:
    learner = learner_with(ER(replay_loss="logits", logit_weight=0.3), scenario, policy(10))
    joint = scenario == "class"
    learner.step(BATCHES)
    memory = deepcopy(learner.memory)
    assert memory is not None
    drawn = memory.draw(4)
    distances = []
    for part in drawn:
        assert part.logits is not None
        for z, stored in zip(logits(learner, part.source, part.x, joint), part.logits, strict=True):
            known = ~stored.isnan()
            distances.append(mse_loss(z[: len(stored)][known], stored[known]))
    replayed = replay_loss(learner, drawn, joint) + 0.3 * torch.stack(distances).mean()
    expected = shared_gradient(learner, (current_loss(learner, BATCHES, joint) + replayed) / 2)
    torch.testing.assert_close(step_taken(learner, BATCHES), expected)


@scenarios
@pytest.mark.parametrize("name", ["er", "mdmtr"])  # whose training compares a task's or all classes
def test_logits_stored_at_the_end_of_a_task_are_what_training_compares(name: str, scenario: Scenario) -> None:
    method = make_method(name, replay_loss="logits")
    learner = Learner(torch.nn.Linear(4, 3), method, memory=BalancedCoreset(20), scenario=scenario)
    for task in ("a", "b"):
        learner.add_task(task, classes=2)
        learner.step({task: (torch.randn(6, 4), torch.arange(6) % 2)})
    for task in ("a", "b"):
        learner.finish_task(task)
    assert learner.memory is not None
    for drawn in learner.memory.draw(20):
        (output,) = learner.model.outputs([Samples(learner.sources[drawn.source], drawn.x, drawn.y, drawn.logits)])
        assert drawn.logits is not None
        torch.testing.assert_close(output.value, drawn.logits)


def trained(method: Method, scenario: Scenario) -> Learner:
    learner = method_runs.new_learner(method, scenario)
    method_runs.run(learner, 0)
    return learner


def weights(learner: Learner) -> list[torch.Tensor]:
    return [*learner.model.backbone.state_dict().values(), *learner.model.head_parameters()]


@scenarios
def test_named_methods_are_points_of_the_space(scenario: Scenario) -> None:
    for one, other in ((GMED(), ER(replay_loss="edited")), (GMED(replay_loss="labels"), ER())):
        for mine, theirs in zip(weights(trained(one, scenario)), weights(trained(other, scenario)), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("replayed", ["logits", "edited"])
@pytest.mark.parametrize("name", ["soro", "mgda", "pcgrad", "mdmtr", "torchjd:UPGrad"])
def test_any_weighting_resumes_exactly_with_any_replay_loss(name: str, replayed: str, tmp_path: Path) -> None:
    def make() -> Learner:
        return method_runs.new_learner(make_method(name, replay_loss=replayed), "class")

    through = make()
    reports = method_runs.run(through, 0)
    assert not any(report.skipped for report in reports)
    resumed = method_runs.paused(make, 5, tmp_path / "checkpoint")
    assert all(torch.equal(a, b) for a, b in zip(weights(through), weights(resumed), strict=True))


def test_options_belong_to_their_loss() -> None:
    assert SORO(replay_loss="logits", logit_weight=2.0).settings.model_dump()["logit_weight"] == 2.0
    assert "stride" not in SORO(replay_loss="logits").settings.model_dump()
    with pytest.raises(SpclError, match="there is no setting 'logit_weight'"):
        SORO(logit_weight=2.0)
    with pytest.raises(SpclError, match="replay_loss = 'logit': Input should be 'labels', 'logits' or 'edited'"):
        SORO(replay_loss="logit")


def test_edited_samples_need_a_memory_of_floats() -> None:
    learner = Learner(torch.nn.Flatten(), SORO(replay_loss="edited"), memory=BalancedCoreset(4))
    learner.add_task("a", classes=2)
    with pytest.raises(SpclError, match="method 'soro' edits inputs, but memory keeps the inputs of task 'a' as"):
        learner.step({"a": (torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([0, 1]))})


def test_options_of_a_replay_loss_tell_runs_apart_beside_runs_without_it() -> None:
    weights = {"labels": [{}], "logits": [{"logit_weight": 0.1}, {"logit_weight": 2.0}]}
    settings = [
        {"benchmark": "b", "method": {"name": "soro", "replay_loss": loss, **options}}
        for loss, choices in weights.items()
        for options in choices
    ]
    labels = [
        RunRecord(Path(), each, None, variant).label
        for each, variant in zip(settings, find_variants(settings), strict=True)
    ]
    assert labels == ["soro", "soro + logits (logit_weight=0.1)", "soro + logits (logit_weight=2)"]


def test_labels_name_the_combination() -> None:
    settings = {"method": {"name": "soro", "replay_loss": "logits", "logit_weight": 2.0}}
    variant = {"method.replay_loss": "logits", "method.logit_weight": 2.0}
    assert RunRecord(Path(), settings, None, variant).label == "soro + logits (logit_weight=2)"
    assert RunRecord(Path(), {"method": {"name": "gmed", "replay_loss": "edited"}}, None).label == "gmed"
