"""A short parallel stream for a learner: tasks that start and end, memory, batch norm, dropout."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from spcl.learner import Batch, Learner, Scenario, StepReport
from spcl.memory import BalancedCoreset, Memory
from spcl.methods import Gradients, Method

CLASSES = {"a": 2, "b": 3, "c": 2}
SPANS = {"a": (0, 3), "b": (1, 7), "c": (4, 7)}
STEPS = 8


def new_backbone(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 5)
    return nn.Sequential(*layers).to(device)


def new_learner(method: Method, scenario: Scenario, memory: Memory | None = None, device: str = "cpu") -> Learner:
    memory = BalancedCoreset(12) if memory is None else memory
    return Learner(new_backbone(device), method, memory=memory, scenario=scenario, memory_batch=6)


def batch(task: str, step: int) -> Batch:
    """Return separable data: the class is the mean of the inputs."""
    generator = torch.Generator().manual_seed(1000 * step + ord(task))
    y = torch.randint(CLASSES[task], (6,), generator=generator)
    return torch.randn(6, 6, generator=generator) + 2.0 * nn.functional.one_hot(y + ord(task) - ord("a"), 6), y


def paused(make: Callable[[], Learner], pause: int, path: Path, device: str = "cpu") -> Learner:
    """Return a learner that was saved at step ``pause``, loaded and run to the end; the first one runs on meanwhile."""
    first = make()
    run(first, 0, pause)
    first.save(path)
    run(first, pause)
    torch.rand(17)
    second = Learner.load(path, backbone=new_backbone(device))
    run(second, pause)
    return second


def is_elementwise(method: Method) -> bool:
    """Return whether the method combines the gradients themselves instead of weighting them."""
    return type(method).combine is not Method.combine


def run(learner: Learner, first: int, last: int = STEPS) -> list[StepReport]:
    """Run the steps from ``first`` up to, not including, ``last``."""
    reports = []
    for step in range(first, last):
        for task, (start, _) in SPANS.items():
            if start == step:
                learner.add_task(task, classes=CLASSES[task])
        active = [task for task, (start, end) in SPANS.items() if start <= step <= end]
        reports.append(learner.step({task: batch(task, step) for task in active}))
        for task in active:
            if SPANS[task][1] == step:
                learner.finish_task(task)
    return reports


def tensors(learner: Learner) -> list[Tensor]:
    """Return the tensors of backbone, heads and memory."""
    heads = [task.head for task in learner.tasks.values() if task.head is not None]
    states = [module.state_dict().values() for module in (learner.model.backbone, *heads)]
    buffers = learner.memory.buffers.values() if learner.memory is not None else ()
    stored = [[buffer.take("x"), buffer.take("y")] for buffer in buffers]
    return [tensor.detach() for group in (*states, *stored) for tensor in group]


def weigh(method: Method, G: Tensor) -> Tensor:
    """Return the update from gradients as columns."""
    names = tuple(map(str, range(G.shape[1])))
    weights = method.weigh(Gradients(names, np.ones(len(names)), G.T @ G)).values
    return G @ weights.double()
