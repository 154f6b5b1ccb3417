"""One step of SGD on copies of a learner's networks, with the columns of G by autograd: the reference of a step."""

import copy
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy

from _learning import TinyResNet, batch
from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import Method

RATE = 0.1
TASKS = {"a": (6, 3), "b": (9, 2), "c": (4, 4)}  # samples in a batch, classes
Batches = Mapping[str, tuple[Tensor, Tensor]]


def batches(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: batch(*sizes, 10 * seed + index, torch.float64) for index, (name, sizes) in enumerate(TASKS.items())}


def trained_learner(method: Method, scenario: str = "task", memory: bool = True, **options: bool) -> Learner:
    """Three tasks after two steps in float64; with a memory the first is finished and rehearsed."""
    learner = Learner(
        TinyResNet().double(),
        method,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        memory=BalancedCoreset(5) if memory else None,
        memory_batch=4,
        scenario=scenario,
        **options,
    )
    for name, (_, classes) in TASKS.items():
        learner.add_task(name, classes=classes)
    for seed in range(2):
        learner.step(batches(seed))
    if memory:
        learner.finish_task("a")
    return learner


def present(learner: Learner, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: pair for name, pair in batches(seed).items() if name in learner.active_tasks}


class ByHand:
    """Copies of a learner's networks, and one step of SGD on them."""

    def __init__(self, learner: Learner) -> None:
        self.backbone = copy.deepcopy(learner.model.backbone)
        self.heads = nn.ModuleDict({name: copy.deepcopy(task.head) for name, task in learner.tasks.items()})
        self.memory = copy.deepcopy(learner.memory)
        self.joint = learner.scenario == "class"

    def loss(self, features: Tensor, task: str, y: Tensor) -> Tensor:
        if not self.joint:
            return cross_entropy(self.heads[task](features), y, reduction="sum")
        offsets = dict(zip(TASKS, np.cumsum([0, *(classes for _, classes in TASKS.values())]).tolist(), strict=False))
        logits = torch.cat([head(features) for head in self.heads.values()], dim=1)
        return cross_entropy(logits, y + offsets[task], reduction="sum")

    def losses(self, given: Batches) -> list[Tensor]:
        columns = [self.loss(self.backbone(x), task, y) / len(x) for task, (x, y) in given.items()]
        drawn = self.memory.draw(4) if self.memory is not None else []
        if drawn:
            features = self.backbone(torch.cat([part.x for part in drawn])).split([len(part.x) for part in drawn])
            parts = [self.loss(some, part.source, part.y) for some, part in zip(features, drawn, strict=True)]
            columns.append(torch.stack(parts).sum() / sum(len(part.x) for part in drawn))
        return columns

    def step(self, given: Batches, combine: Callable[[Tensor, bool], Tensor], alpha: float = 0.0) -> None:
        shared, own = list(self.backbone.parameters()), list(self.heads.parameters())
        losses = self.losses(given)
        gradients = [torch.autograd.grad(loss, shared + own, allow_unused=True) for loss in losses]
        rows = torch.stack([torch.cat([g.flatten() for g in some[: len(shared)]]) for some in gradients])
        rows += alpha * self.orthogonality_gradient(shared)
        update = combine(rows, len(losses) > len(given))
        with torch.no_grad():
            for parameter, change in zip(shared, update.split([p.numel() for p in shared]), strict=True):
                parameter -= RATE * change.view_as(parameter)
            for index, parameter in enumerate(own, start=len(shared)):
                for some in gradients:
                    if some[index] is not None:
                        parameter -= RATE * some[index]

    def orthogonality_gradient(self, shared: list[nn.Parameter]) -> Tensor:
        """That of ‖conv(K, K) − I‖² over the convolutions, through conv2d."""
        penalty = torch.zeros((), dtype=torch.float64)
        for module in self.backbone.modules():
            if isinstance(module, nn.Conv2d):
                kernel, stride = module.weight, module.stride[0]
                padding = (kernel.shape[-1] - 1) // stride * stride
                correlation = conv2d(kernel, kernel, stride=stride, padding=padding)
                target = torch.zeros_like(correlation)
                target[:, :, padding // stride, padding // stride] = torch.eye(len(kernel))
                penalty = penalty + (correlation - target).square().sum()
        gradients = torch.autograd.grad(penalty, shared, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])


def assert_equals_by_hand(learner: Learner, reference: ByHand, tolerance: float = 1e-9) -> None:
    pairs = [(learner.model.backbone, reference.backbone)]
    pairs += [(task.head, reference.heads[name]) for name, task in learner.tasks.items()]
    for found, expected in pairs:
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(found.state_dict()[key], value, rtol=tolerance, atol=tolerance, msg=key)


def er_by_hand(rows: Tensor, with_memory: bool) -> Tensor:
    if not with_memory:
        return rows.mean(dim=0)
    return (rows[:-1].mean(dim=0) + rows[-1]) / 2


def soro_by_hand(rows: Tensor, with_memory: bool, scale: str = "min") -> Tensor:
    """The paper's Algorithm 1 on the n×T matrix itself; then, as its authors' code does, times σ_min(G)."""
    sigma, lambda_, tolerance = 100.0, 100.0, 1e-3
    G = rows.T
    U, singular, Vh = torch.linalg.svd(G, full_matrices=False)
    adjusted, d, previous = U @ Vh, torch.ones(len(rows), dtype=G.dtype), None
    for iteration in range(101):
        excess = adjusted.T @ adjusted - torch.diag(d)
        objective = float(
            (G - adjusted).square().sum() + sigma * excess.square().sum() + lambda_ * (d - 1).square().sum()
        )
        if iteration == 100 or (previous is not None and previous - objective < tolerance):
            break
        adjusted = adjusted - (2 * (adjusted - G) + 4 * sigma * adjusted @ excess) / (8 * sigma + 2)
        d = (lambda_ + sigma * (adjusted.T @ adjusted).diagonal()) / (lambda_ + sigma)
        previous = objective
    return adjusted.sum(dim=1) * (singular[-1] if scale == "min" else 1.0)
