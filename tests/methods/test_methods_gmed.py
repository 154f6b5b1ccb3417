"""GMED, which edits memory, against autograd on tiny networks."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replay_steps import (
    BATCHES,
    batch,
    current_loss,
    learner_with,
    policies,
    replay_loss,
    scenarios,
    shared_gradient,
    step_taken,
)
from spcl.errors import SpclError
from spcl.learner import Learner, Scenario
from spcl.memory import BalancedCoreset, Memory, ReplayBatch, Reservoir
from spcl.methods import ER, GMED

pytestmark = pytest.mark.usefixtures("double")


def edited(learner: Learner, drawn: list[ReplayBatch], settings: dict[str, float], joint: bool) -> list[Tensor]:
    """Eq. 3, sample by sample, with a look-ahead network that is a copy."""
    ahead = deepcopy(learner)
    gradients = shared_gradient(learner, current_loss(learner, BATCHES, joint))
    with torch.no_grad():
        for parameter, gradient in zip(ahead.model.backbone.parameters(), gradients, strict=True):
            parameter -= settings["rate"] * gradient
    inputs = torch.cat([part.x.flatten() for part in drawn])
    variance = ((inputs - inputs.mean()) ** 2).mean()
    results = []
    for part in drawn:
        rows = []
        for x, y, k in zip(part.x, part.y, part.edits.tolist(), strict=True):
            x = x.clone().requires_grad_()
            sample = ReplayBatch(part.source, x[None], y[None], None, part.slots[:1], part.edits[:1])
            now, later = (replay_loss(model, [sample], joint) for model in (learner, ahead))
            (slope,) = torch.autograd.grad(later - now - settings["regularisation"] * now, x)
            rows.append(x.detach() + settings["decay"] ** k * settings["stride"] * variance * slope)
        results.append(torch.stack(rows))
    return results


@scenarios
@policies
def test_gmed_edits_replays_and_writes_back(scenario: Scenario, policy: Any) -> None:
    settings = {"stride": 0.5, "regularisation": 0.1, "decay": 0.8, "rate": 0.2}
    learner = learner_with(GMED(**settings), scenario, policy(12))
    joint = scenario == "class"
    for _ in range(3):
        learner.step(BATCHES)
    memory = deepcopy(learner.memory)
    assert memory is not None
    drawn = memory.draw(4)
    assert any(part.edits.sum() > 0 for part in drawn), "no sample was edited before"
    inputs = edited(learner, drawn, settings, joint)
    replayed = [
        ReplayBatch(part.source, x, part.y, None, part.slots, part.edits) for part, x in zip(drawn, inputs, strict=True)
    ]
    loss = (current_loss(learner, BATCHES, joint) + replay_loss(learner, replayed, joint)) / 2
    expected = shared_gradient(learner, loss)
    torch.testing.assert_close(step_taken(learner, BATCHES), expected)
    if policy is BalancedCoreset:  # whose samples keep their slots while no task finishes
        assert learner.memory is not None
        for part, x in zip(drawn, inputs, strict=True):
            buffer = learner.memory.buffers[part.source]
            torch.testing.assert_close(buffer.take("x")[part.slots], x)
            assert buffer.edits[part.slots.numpy()].tolist() == (part.edits + 1).tolist()


def test_gmed_edits_are_independent_of_units() -> None:
    """Inputs a hundred times larger, seen through a first layer as much smaller, move a hundred times as far."""
    moved = []
    for units in (1.0, 100.0):
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        with torch.no_grad():
            backbone[0].weight /= units
        method, rate = GMED(stride=1.0), 1e-12  # without a look-ahead, whose step does depend on the units
        learner = Learner(
            backbone, method, optimizer=partial(torch.optim.SGD, lr=rate), memory=BalancedCoreset(6), memory_batch=6
        )
        method.settings = method.settings.model_copy(update={"rate": rate, "regularisation": 1.0})
        learner.add_task("a", classes=2)
        x, y = batch("a", 0, size=8)
        learner.step({"a": (units * x, y)})
        learner.finish_task("a")
        assert learner.memory is not None
        buffer = learner.memory.buffers["a"]
        before = buffer.take("x").clone()
        learner.add_task("b", classes=2)
        learner.step({"b": (units * x, y)})
        moved.append((buffer.take("x") - before) / units)
    assert moved[0].abs().max() > 1e-3
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-9)


@policies
def test_memory_counts_the_edits_of_every_sample_wherever_it_moves(policy: Any) -> None:
    """An edit adds 1000 to inputs below 1, so they tell how often they were edited."""
    memory: Memory = policy(30)
    for task in ("a", "b", "c"):
        memory.start(task, 2)
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        for task in ("a", "b", "c")[step // 15 :]:
            memory.observe(task, torch.rand(4, 3, generator=generator), torch.arange(4) % 2)
        if step in (14, 29):
            memory.finish("a" if step == 14 else "b")
        for part in memory.draw(7):
            memory.replace(part, part.x + 1000.0)
        if step == 20:
            saved = memory.state_dict()
            memory = policy(30)
            memory.load_state_dict(saved)
    counted = [buffer.edits for buffer in memory.buffers.values()]
    expected = [(buffer.take("x")[:, 0] // 1000).tolist() for buffer in memory.buffers.values()]
    assert [edits.tolist() for edits in counted] == expected
    assert max(edits.max(initial=0) for edits in counted) > 1


def test_gmed_with_no_stride_is_er() -> None:
    parameters = []
    for method in (GMED(stride=0.0), ER()):
        learner = learner_with(method, "task", BalancedCoreset(8))
        for _ in range(3):
            learner.step(BATCHES)
        parameters.append([parameter.detach() for parameter in learner.model.backbone.parameters()])
    torch.testing.assert_close(*parameters)  # its replay takes a pass of its own: sums are added in another order


def test_gmed_needs_a_memory_of_floats() -> None:
    images = torch.randint(256, (4, 4), dtype=torch.uint8)

    class Floats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x / 255)  # type: ignore[no-any-return]

    def trained(memory: Memory | None) -> Learner:
        learner = Learner(Floats(), GMED(), memory=memory)
        learner.add_task("a", classes=2)
        learner.step({"a": (images, torch.tensor([0, 1, 0, 1]))})
        return learner

    with pytest.raises(
        SpclError, match=r"keeps the inputs of task 'a' as torch.uint8; build it with dtype=torch.float32"
    ):
        trained(Reservoir(4))
    with pytest.raises(SpclError, match=r"as torch\.int64"):
        trained(Reservoir(4, dtype=torch.int64))
    trained(None)
    learner = trained(Reservoir(4, dtype=torch.float64))
    for _ in range(3):
        assert "memory" in learner.step({"a": (images, torch.tensor([0, 1, 0, 1]))}).losses
