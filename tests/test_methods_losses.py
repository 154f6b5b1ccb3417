"""DER++, MDMTR and GMED, which change losses or memory, against autograd on tiny networks."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from spcl.errors import SpclError, TaskError
from spcl.learner import Learner, Scenario
from spcl.memory import BalancedCoreset, Memory, ReplayBatch, Reservoir
from spcl.methods import DERPP, ER, GMED, MDMTR, CosineHead, Method

CLASSES = {"a": 2, "b": 3, "c": 2}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch(task: str, seed: int, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES[task], (size,), generator=generator)


def learner_with(method: Method, scenario: Scenario, memory: Memory) -> Learner:
    """A learner that has finished task a, knows b, and steps by the plain gradient."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    sgd = partial(torch.optim.SGD, lr=1.0)
    learner = Learner(backbone, method, optimizer=sgd, memory=memory, scenario=scenario, memory_batch=4)
    learner.add_task("a", classes=CLASSES["a"])
    for step in range(3):
        learner.step({"a": batch("a", step)})
    learner.add_task("b", classes=CLASSES["b"])
    learner.step({"a": batch("a", 3), "b": batch("b", 4)})
    learner.finish_task("a")
    learner.add_task("c", classes=CLASSES["c"])
    return learner


def logits(learner: Learner, task: str, x: Tensor, joint: bool) -> Tensor:
    features = learner.model.backbone(x)
    heads = [learner.tasks[name].head for name in (learner.tasks if joint else [task])]
    return torch.cat([head(features) for head in heads if head is not None], dim=1)


def labels(learner: Learner, task: str, y: Tensor, joint: bool) -> Tensor:
    return y + learner.tasks[task].offset if joint else y


def shared_gradient(learner: Learner, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(learner.model.backbone.parameters())))


def step_taken(learner: Learner, batches: dict[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
    before = [parameter.detach().clone() for parameter in learner.model.backbone.parameters()]
    learner.step(batches)
    return [old - new.detach() for old, new in zip(before, learner.model.backbone.parameters(), strict=True)]


def current_loss(learner: Learner, batches: dict[str, tuple[Tensor, Tensor]], joint: bool) -> Tensor:
    losses = [
        cross_entropy(logits(learner, task, x, joint), labels(learner, task, y, joint))
        for task, (x, y) in batches.items()
    ]
    return torch.stack(losses).mean()


def replay_loss(learner: Learner, drawn: list[ReplayBatch], joint: bool) -> Tensor:
    losses = [
        cross_entropy(
            logits(learner, part.task, part.x, joint), labels(learner, part.task, part.y, joint), reduction="none"
        )
        for part in drawn
    ]
    return torch.cat(losses).mean()


BATCHES = {"b": batch("b", 5), "c": batch("c", 6)}
scenarios = pytest.mark.parametrize("scenario", ["task", "class"])
policies = pytest.mark.parametrize("policy", [BalancedCoreset, Reservoir])


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
        for row, (z, stored) in enumerate(zip(logits(learner, part.task, part.x, joint), part.logits, strict=True)):
            known = [k for k, value in enumerate(stored.tolist()) if value == value]
            assert known, (part.task, row)
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
    parts = {part.task: part for part in learner.memory.draw(100)}
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
    replayed = torch.cat([margin_loss(learner, part.task, part.x, part.y, 7.0, 0.3, 0.2) for part in drawn]).mean()
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


# -- GMED


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
            sample = ReplayBatch(part.task, x[None], y[None], None, part.slots[:1], part.edits[:1])
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
        ReplayBatch(part.task, x, part.y, None, part.slots, part.edits) for part, x in zip(drawn, inputs, strict=True)
    ]
    loss = (current_loss(learner, BATCHES, joint) + replay_loss(learner, replayed, joint)) / 2
    expected = shared_gradient(learner, loss)
    torch.testing.assert_close(step_taken(learner, BATCHES), expected)
    if policy is BalancedCoreset:  # whose samples keep their slots while no task finishes
        assert learner.memory is not None
        for part, x in zip(drawn, inputs, strict=True):
            buffer = learner.memory.buffers[part.task]
            torch.testing.assert_close(buffer.fields["x"][part.slots], x)
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
        before = buffer.fields["x"][: buffer.size].clone()
        learner.add_task("b", classes=2)
        learner.step({"b": (units * x, y)})
        moved.append((buffer.fields["x"][: buffer.size] - before) / units)
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
    expected = [(buffer.fields["x"][: buffer.size, 0] // 1000).tolist() for buffer in memory.buffers.values()]
    assert [edits.tolist() for edits in counted] == expected
    assert max(edits.max(initial=0) for edits in counted) > 1


def test_gmed_with_no_stride_is_er() -> None:
    parameters = []
    for method in (GMED(stride=0.0), ER()):
        learner = learner_with(method, "task", BalancedCoreset(8))
        for _ in range(3):
            learner.step(BATCHES)
        parameters.append([parameter.detach() for parameter in learner.model.backbone.parameters()])
    torch.testing.assert_close(*parameters, rtol=0, atol=0)


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

    with pytest.raises(SpclError, match=r"keeps those of task 'a' as torch.uint8; build it with dtype=torch.float32"):
        trained(Reservoir(4))
    with pytest.raises(SpclError, match=r"as torch\.int64"):
        trained(Reservoir(4, dtype=torch.int64))
    trained(None)
    learner = trained(Reservoir(4, dtype=torch.float64))
    for _ in range(3):
        assert "memory" in learner.step({"a": (images, torch.tensor([0, 1, 0, 1]))}).losses
