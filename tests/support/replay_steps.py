"""Steps of a learner that replays memory, and their losses and gradients by autograd."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.learner import Learner, Scenario
from spcl.memory import BalancedCoreset, Memory, ReplayBatch, Reservoir
from spcl.methods import Method

CLASSES = {"a": 2, "b": 3, "c": 2}


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
            logits(learner, part.source, part.x, joint), labels(learner, part.source, part.y, joint), reduction="none"
        )
        for part in drawn
    ]
    return torch.cat(losses).mean()


BATCHES = {"b": batch("b", 5), "c": batch("c", 6)}
scenarios = pytest.mark.parametrize("scenario", ["task", "class"])
policies = pytest.mark.parametrize("policy", [BalancedCoreset, Reservoir])
