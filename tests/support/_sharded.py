"""Learners whose backbones are sharded over the ranks; cases that ranks call with their world."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch._dynamo  # imported by fully_shard, here once for all ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from _ranks import STEPS, arrays, new_backbone, new_learner, train
from method_runs import batch
from spcl.distributed import World
from spcl.learner import Learner, Scenario
from spcl.memory import BalancedCoreset
from spcl.methods import make_method

AVERAGED = {"clip_norm": 0.3, "average": 0.9, "optimizer": partial(torch.optim.Adam, lr=0.01)}


def shard(backbone: nn.Module, world: World | None) -> nn.Module:
    """Shard a backbone, and the first of its layers for itself, over the ranks that split batches."""
    if world is not None:
        fully_shard(backbone[0], mesh=world.mesh["data"])  # type: ignore[index]
        fully_shard(backbone, mesh=world.mesh["data"])
    return backbone


def shard_over_all(backbone: nn.Module, world: World | None) -> nn.Module:
    return backbone if world is None else fully_shard(backbone)


def freeze_and_shard(backbone: nn.Module, world: World | None) -> nn.Module:
    backbone[0].requires_grad_(False)  # type: ignore[index]
    return shard(backbone, world)


def trained(world: World | None, name: str, scenario: Scenario, **options: Any) -> list[Any]:
    """Return the tensors of a trained learner, and logits of its weights or their average."""
    options = {"batch_norm": False, "prepare": shard} | options
    return _tensors(train(new_learner(world, name, scenario, **options)))


def saved(world: World | None, path: Path) -> None:
    options = {"batch_norm": False, "prepare": shard, "options": AVERAGED}
    train(new_learner(world, "soro", "class", **options), 0, STEPS // 2).save(path)


def resumed(world: World | None, path: Path, prepare: Any = shard) -> list[Any]:
    backbone = prepare(new_backbone(batch_norm=False), world)
    return _tensors(train(Learner.load(path, backbone=backbone, distributed=world), STEPS // 2))


def _tensors(learner: Learner) -> list[Any]:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    return [*arrays(learner), learner.logits(x, "b").numpy()]


def with_batch_norm(world: World) -> tuple[list[Any], list[Any]]:
    """Return the tensors of two learners with batch-norm, one sharded, one not."""
    sharded, plain = (trained(world, "soro", "task", batch_norm=True, prepare=each) for each in (shard, _as_it_is))
    return sharded, plain


def _as_it_is(backbone: nn.Module, world: World | None) -> nn.Module:
    return backbone


def held(world: World) -> dict[str, int]:
    """Return how many numbers a rank holds of parameters, rows of gradients and averages, and how many there are."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    count = sum(each.numel() for each in backbone.parameters())
    learner = Learner(shard(backbone, world), make_method("soro"), distributed=world)
    for task in ("a", "b"):
        learner.add_task(task, classes=3)
    learner.step({task: batch(task, 0) for task in ("a", "b")})
    states = [learner.optimizer.state[each] for each in backbone.parameters()]
    local = [tensor.to_local() for state in states for tensor in state.values() if hasattr(tensor, "to_local")]
    buffers = [learner._engine.gradients.buffer, learner._engine.local.gradients.buffer]  # type: ignore[attr-defined]
    return {
        "all": count,
        "parameters": sum(each.to_local().numel() for each in backbone.parameters()),  # type: ignore[operator]
        "optimizer": sum(each.numel() for each in local),
        "rows": sum({each.data_ptr(): each.numel() for each in buffers}.values()),
    }


def after_wrong_inputs(world: World | None) -> tuple[str, list[Any]]:
    """Return the error of a step with inputs that do not fit, and the tensors after further steps."""
    learner, message = new_learner(world, "soro", "task", batch_norm=False, prepare=shard), "no error"
    train(learner, 0, 2)
    learner.add_task("d", classes=2)
    try:
        learner.step({"b": batch("b", 0), "d": (torch.ones(4, 9), torch.zeros(4, dtype=torch.int64))})
    except ValueError as error:
        message = str(error)
    learner.finish_task("d")
    backbone = train(learner, 2, 5).model_state()["backbone"]
    return message, [tensor.numpy() for tensor in backbone.values()]


class MeanOverTime(nn.Module):
    """Features of sequences of any length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1)


def with_samples_of_two_kinds(world: World) -> None:
    """Replay sequences of two lengths."""
    backbone = shard(nn.Sequential(nn.Linear(6, 5), MeanOverTime()), world)
    learner = Learner(backbone, make_method("er"), memory=BalancedCoreset(12), distributed=world)
    for length, task in enumerate(("a", "b", "c"), start=1):
        learner.add_task(task, classes=2)
        learner.step({task: (torch.ones(4, length, 6), torch.arange(4) % 2)})
        learner.finish_task(task)


def fitted(world: World, path: Path) -> int:
    """Return how many checkpoints a rank has taken part in; only the first rank has one due at each step."""
    learner = new_learner(world, "er", "task", batch_norm=False, prepare=shard)
    moments = [SimpleNamespace(batches={"a": batch("a", step)}, started=["a"], ended=[]) for step in range(3)]
    saved: list[int] = []
    stream = Stream(moments, saved)
    learner.fit(stream, checkpoint=path, every=0.0 if world.is_first else 60.0)
    return len(saved)


class Stream(list[Any]):
    """Moments of one task, which notes when it is saved."""

    classes: ClassVar = {"a": 2}

    def __init__(self, moments: list[Any], saved: list[int]) -> None:
        super().__init__(moments)
        self._saved = saved

    def commit(self) -> None:
        self._saved.append(1)


def refused(world: World) -> list[str]:
    """Return why sharded backbones are refused."""
    backbone = shard(new_backbone(batch_norm=False), world)
    part = nn.Sequential(fully_shard(nn.Linear(6, 5), mesh=world.mesh["data"]), nn.Linear(5, 5))
    learner = Learner(backbone, make_method("er"), distributed=world)
    other = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5))
    attempts = [
        lambda: Learner(backbone, make_method("er")),
        lambda: Learner(part, make_method("er"), distributed=world),
        lambda: Learner(fully_shard(other, mesh=world.mesh["task"]), make_method("er"), distributed=world),
        lambda: Learner(backbone, make_method("graddrop"), distributed=world),
        lambda: Learner(backbone, make_method("gmed"), distributed=world),
        lambda: Learner(backbone, make_method("soro", weigh_heads=True), distributed=world),
        lambda: Learner(backbone, make_method("soro", alpha=0.1), distributed=world),
        lambda: learner.freeze("0.*"),
        learner.snapshot,
        lambda: learner.module("a"),
    ]
    return [_message(attempt) for attempt in attempts]


def _message(attempt: Any) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "no error"
