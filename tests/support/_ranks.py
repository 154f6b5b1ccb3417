"""Real processes that train together, on gloo; a process group is started once and then runs many cases."""

import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from method_runs import CLASSES, batch, tensors
from spcl.distributed import World, join_world
from spcl.engine.ranks import whole
from spcl.learner import Learner, Scenario
from spcl.losses import CrossEntropy
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import make_method
from spcl.runs import RunSettings, execute

SPANS = {"a": (0, 4), "b": (1, 11), "c": (5, 11)}
STEPS = 12

Case = Callable[[World | None], Any]


class Ranks:
    """Processes of one group, which call a function with their world and return what it gives or raises."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["_sharded"])  # PyTorch is imported once
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ends = [context.Pipe() for _ in range(size)]
        self._pipes = [here for here, _ in ends]
        self.processes = [
            context.Process(target=_serve, args=(rank, size, port, there), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # else nothing is found that is preloaded
            for process in self.processes:
                process.start()

    def start(self, case: Case, size: int, split: str = "tasks") -> None:
        """Let the first ``size`` ranks call a function."""
        for pipe in self._pipes:
            pipe.send((case, size, split))

    def results(self) -> list[Any]:
        """Return what the ranks that took part have returned; errors as exceptions."""
        answers = [pipe.recv() for pipe in self._pipes]
        return [value for took_part, value in answers if took_part]

    def call(self, case: Case, size: int, split: str = "tasks") -> list[Any]:
        self.start(case, size, split)
        return self.results()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # so that rounding is small after many steps
    warnings.simplefilter("error")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    join_world()
    groups = {fewer: dist.new_group(list(range(fewer))) for fewer in range(2, size)} | {size: None}
    worlds: dict[tuple[int, str], World] = {}
    while (given := pipe.recv()) is not None:
        case, ranks, split = given
        try:
            if rank < ranks and (ranks, split) not in worlds:
                worlds[ranks, split] = World(groups[ranks], split)
            pipe.send((rank < ranks, case(worlds[ranks, split]) if rank < ranks else None))
        except Exception as error:
            pipe.send((True, error if isinstance(error, ValueError) else RuntimeError(traceback.format_exc())))
    os._exit(0)  # without waiting for the others


def compare(found: list[Any], expected: list[Any], rounding: float = 1e-11) -> None:
    """Check that the ranks are equal to the bit, and to one process up to rounding."""
    for each in found:
        assert not isinstance(each, Exception), each
        for one, other in zip(each, found[0], strict=True):
            assert one.tobytes() == other.tobytes()
    for one, other in zip(found[0], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * max(1.0, np.abs(other).max(initial=0.0)))


def new_learner(
    world: World | None,
    name: str,
    scenario: Scenario,
    dropout: float = 0.0,
    momentum: float | None = 0.3,
    batch_norm: bool = True,
    prepare: Callable[[nn.Module, World | None], nn.Module] = lambda backbone, world: backbone,
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Learner:
    return Learner(
        prepare(new_backbone(dropout, momentum, batch_norm), world),
        make_method(name, **settings),
        scenario=scenario,
        memory_batch=6,
        distributed=world,
        **{"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.5), "memory": BalancedCoreset(12), **options},
    )


def new_backbone(dropout: float = 0.0, momentum: float | None = 0.3, batch_norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8, momentum=momentum)] * batch_norm
    return nn.Sequential(nn.Linear(6, 8), *norm, nn.ReLU(), *[nn.Dropout(dropout)] * bool(dropout), nn.Linear(8, 5))


def train(learner: Learner, first: int = 0, last: int = STEPS) -> Learner:
    """Train on tasks that start and end, with memory."""
    for step in range(first, last):
        for task, (start, _) in SPANS.items():
            if start == step:
                learner.add_task(task, classes=CLASSES[task])
        active = [task for task, (start, end) in SPANS.items() if start <= step <= end]
        learner.step({task: batch(task, step) for task in active})
        for task in active:
            if SPANS[task][1] == step:
                learner.finish_task(task)
    return learner


# -- cases, called with the world


def trained(world: World | None, name: str, scenario: Scenario, **settings: Any) -> list[Any]:
    """Return all tensors of a trained learner."""
    return arrays(train(new_learner(world, name, scenario, **settings)))


def trained_on_numbers(world: World | None) -> list[Any]:
    """Return all tensors of a learner that replays the outputs of a classifier and of a head of its own."""
    learner = new_learner(world, "der++", "task", batch_norm=False, options={"memory": Reservoir(12)})
    learner.add_task("a", classes=CLASSES["a"])
    learner.add_task("speed", head=nn.Linear(5, 3), loss=nn.functional.mse_loss)
    for step in range(8):
        x, y = batch("a", step)
        learner.step({"a": (x, y), "speed": (x, x[:, :3])})
    assert learner.memory is not None
    buffer = learner.memory.buffers["speed"]
    return [*arrays(learner), buffer.take("logits").numpy()]


def trained_on_sources(world: World | None, name: str, alpha: float = 0.0) -> list[Any]:
    """Return all tensors of a learner whose sources share tasks and encoders; one ends and returns."""
    learner = new_learner(world, name, "class", batch_norm=False, options={"memory": Reservoir(12)}, alpha=alpha)
    torch.manual_seed(1)
    shared = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    learner.add_task("kind", classes=2)
    learner.add_task("place", classes=3)
    learner.add_source("one", "kind", encoder=shared)
    learner.add_source("two", "place", encoder=shared)
    learner.add_source("own", "kind", encoder=nn.Linear(3, 6))
    learner.add_source("both", ["kind", "place"], encoder="affine")
    for step in range(9):
        given: dict[str, Any] = {
            name: _of_source(step, width, classes) for name, width, classes in (("two", 4, 3), ("own", 3, 2))
        }
        x, y = _of_source(50 + step, 6, 2)
        given["both"] = (x, {"kind": y, "place": y})
        if not 3 <= step < 6:
            given["one"] = _of_source(70 + step, 4, 2)
        if step == 3:
            learner.finish_source("one")
        if step == 6:
            learner.add_source("one")
            learner.add_classes("kind", 1)
        learner.step(given)
    encoders = [p.detach() for encoder in learner.model.encoders for p in encoder.parameters()]
    return [*arrays(learner), *(each.numpy() for each in encoders)]


def _of_source(seed: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, width, generator=generator), torch.randint(classes, (5,), generator=generator)


@contextmanager
def single_precision() -> Iterator[None]:
    """Let new tensors be float32 within the block, as they are by default."""
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float64)


def trained_in_float32(world: World | None) -> list[Any]:
    with single_precision():
        return arrays(train(new_learner(world, "soro", "class", batch_norm=False), 0, 8))


def trained_in_bfloat16(world: World | None) -> list[Any]:
    learner = Learner(new_backbone(batch_norm=False).bfloat16(), make_method("er"), distributed=world)
    learner.add_task("a", classes=CLASSES["a"])
    x, y = batch("a", 0)
    learner.step({"a": (x.bfloat16(), y)})
    return [parameter.detach().float().numpy() for parameter in learner.model.backbone.parameters()]


def arrays(learner: Learner) -> list[Any]:
    return [whole(tensor).numpy() for tensor in tensors(learner)]


def saved(world: World | None, path: Path, pause: int, batch_norm: bool = True) -> None:
    train(new_learner(world, "soro", "class", batch_norm=batch_norm), 0, pause).save(path)


def resumed(world: World | None, path: Path, pause: int, batch_norm: bool = True) -> list[Any]:
    backbone = new_backbone(batch_norm=batch_norm)
    return arrays(train(Learner.load(path, backbone=backbone, distributed=world), pause))


def with_bad_batches(
    world: World | None, bad: bool, sample: int | None = None, batch_norm: bool = True, **options: Any
) -> tuple[list[Any], list[str]]:
    """Return tensors and skipped tasks of a learner that gets a task with non-finite samples."""
    learner = train(new_learner(world, "soro", "task", batch_norm=batch_norm, **options), 0, 4)
    batches = {task: batch(task, 4) for task in ("a", "b")}
    if bad:
        batches["b"][0][slice(None) if sample is None else sample] = torch.nan  # type: ignore[index]
    else:
        del batches["b"]
    report = learner.step(batches)
    return arrays(learner), list(report.skipped)


def after_error(world: World | None, **options: Any) -> tuple[str, list[Any]]:
    """Return the error of a step in which the loss of one task raises, and the tensors after a further step."""
    learner, broken = new_learner(world, "soro", "task", **options), [False]

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if broken[0]:
            raise RuntimeError("a loss that fails")
        return nn.functional.mse_loss(output, targets)

    learner.add_task("a", classes=2)
    learner.add_task("speed", head=nn.Linear(5, 1), loss=loss)
    x, y = batch("a", 0)
    batches = {"a": (x, y), "speed": (x, x[:, :1])}
    learner.step(batches)
    broken[0], message = True, "no error"
    try:
        learner.step(batches)
    except ValueError as error:
        message = str(error)
    broken[0] = False
    learner.step(batches)
    return message, arrays(learner)


@dataclass
class Moment:
    batches: dict[str, Any]
    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


def fitted(world: World | None, path: Path, bad: str) -> tuple[str, list[Any]]:
    """Return the error of fitting moments where one batch is bad or missing, and the tensors."""
    learner = new_learner(world, "soro", "task")
    learner.add_task("a", classes=CLASSES["a"])
    learner.add_task("b", classes=CLASSES["b"])
    moments = [Moment({task: batch(task, step) for task in "ab"}) for step in range(4)]
    x, y = moments[2].batches.pop("b")
    if bad == "everywhere" or (bad == "on rank 1" and world is not None and world.rank == 1):
        moments[2].batches["b"] = x, y + 50
    elif bad == "on rank 1":
        moments[2].batches["b"] = x, y
    stream, message = iter(moments), "no error"
    try:
        learner.fit(stream, checkpoint=path)
    except ValueError as error:
        message = str(error)
        if bad == "everywhere":
            learner.fit(stream)
    return message, arrays(learner)


def with_fault(world: World | None, fault: str) -> tuple[Exception | None, list[Any]]:
    """Return the error of a step with a fault on rank 1 alone, and the tensors and random numbers after further steps.

    A single process makes the same steps without the faulty one.
    """
    broken = False

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if broken and fault == "first loss":
            raise RuntimeError("a loss that fails")
        return nn.functional.mse_loss(output, targets)

    def augment(x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        if broken and fault == "augmentation":
            raise RuntimeError("an augmentation that fails")
        return x + 0.1 * noise

    learner, error = new_learner(world, "rlw", "task", options={"augment": augment}), None
    learner.add_task("a", classes=2)
    learner.add_task("speed", head=nn.Linear(5, 1), loss=loss)
    for step in range(6):
        x, y = batch("a", step)
        batches = {"a": (x, y), "speed": (x, x[:, :1])}
        if world is not None and step == (0 if "first" in fault else 3):
            broken = world.rank == 1
            given = dict(batches)
            if broken and "label" in fault:
                given["a"] = (x, y + 5)
            if broken and fault == "unknown task":
                given["unknown"] = (x, y)
            try:
                learner.step(given)
            except Exception as caught:
                error = caught
            broken = False
        learner.step(batches)
    return error, [*arrays(learner), torch.get_rng_state().numpy()]


def large_batches(step: int) -> dict[str, Any]:
    """Return batches of 12 and 11 samples."""
    generator = torch.Generator().manual_seed(step)
    draw = partial(torch.randint, 2, generator=generator)
    return {task: (torch.randn(size, 6, generator=generator), draw((size,))) for task, size in (("a", 12), ("b", 11))}


def heads() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {"a": nn.Linear(5, 2), "b": nn.Linear(5, 2)}


def trained_on_large_batches(world: World, momentum: float | None) -> list[Any]:
    """Return all tensors of a learner with batch-norm and no memory."""
    optimizer = partial(torch.optim.SGD, lr=0.05)
    learner = Learner(new_backbone(momentum=momentum), make_method("er"), optimizer=optimizer, distributed=world)
    for task, head in heads().items():
        learner.add_task(task, head=head, loss=nn.functional.cross_entropy)
    for step in range(STEPS):
        learner.step(large_batches(step))
    return arrays(learner)


def trained_by_shares(shares: int, momentum: float | None) -> list[Any]:
    """Return what :func:`trained_on_large_batches` does, by a loop over shares, each with its own statistics."""
    backbone, by_task = new_backbone(momentum=momentum), heads()
    for step in range(STEPS):
        backbone.zero_grad()
        for task, (x, y) in large_batches(step).items():
            by_task[task].zero_grad()
            before, found = _buffers(backbone), []
            for share in range(shares):
                backbone.load_state_dict(before, strict=False)
                loss = nn.functional.cross_entropy(by_task[task](backbone(x[share::shares])), y[share::shares])
                (loss * len(y[share::shares]) / len(y)).backward()
                found.append(_buffers(backbone))
            mean = {name: sum(each[name] for each in found) / shares for name in before}
            backbone.load_state_dict(mean, strict=False)
        with torch.no_grad():
            for module, factor in ((backbone, 0.5), *((head, 1.0) for head in by_task.values())):
                for parameter in module.parameters():
                    parameter -= 0.05 * factor * parameter.grad
    return [tensor.numpy() for module in (backbone, *by_task.values()) for tensor in module.state_dict().values()]


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def trained_on_uneven_batches(world: World | None, method: str, **options: Any) -> list[Any]:
    """Return all tensors of a learner whose batches have 7, 3 and 1 samples, and memory's 5."""
    learner = new_learner(world, method, "class", batch_norm=False, **options)
    learner.memory_batch = 5
    sizes = {"a": 7, "b": 3, "c": 1}
    for task in sizes:
        learner.add_task(task, classes=CLASSES[task])
    for step in range(6):
        joined = {task: [batch(task, step), batch(task, step + 100)] for task in sizes}
        learner.step(
            {
                task: tuple(torch.cat(parts)[: sizes[task]] for parts in zip(*pair, strict=True))
                for task, pair in joined.items()
            }
        )
    return arrays(learner)


def contrast(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss that compares samples with each other."""
    return torch.logsumexp(output @ output.T, dim=1).mean()


def with_loss(world: World, kind: str) -> None:
    """Train with a loss that is no mean over samples."""
    learner = new_learner(world, "er", "task")
    if kind == "weighted":
        learner.add_task("a", classes=2, loss=CrossEntropy(class_weights=(1.0, 3.0)))
    else:
        summed = partial(nn.functional.cross_entropy, reduction="sum")
        learner.add_task("a", head=nn.Linear(5, 2), loss=summed if kind == "sum" else contrast)
    learner.step({"a": batch("a", 0)})


def synchronised(world: World) -> tuple[list[int], str]:
    """Return the ranks over which layers synchronise, and the error of a batch that is too small for them."""
    backbone = nn.SyncBatchNorm.convert_sync_batchnorm(new_backbone())
    learner = Learner(backbone, make_method("er"), distributed=world)
    learner.add_task("a", classes=2)
    message, (x, y) = "no error", batch("a", 0)
    try:
        learner.step({"a": (x[:3], y[:3])})
    except ValueError as error:
        message = str(error)
    return dist.get_process_group_ranks(backbone[1].process_group), message


def fallback_reason(world: World | None) -> str | None:
    """Return why a step of three tasks was not one pass."""
    learner = new_learner(world, "soro", "task", momentum=None)
    for task, classes in CLASSES.items():
        learner.add_task(task, classes=classes)
    learner.step({task: batch(task, 0) for task in CLASSES})
    return learner.fallback_reason


def collectives(world: World, name: str, batch_norm: bool) -> list[str]:
    """Return the collectives of one step of two tasks and memory, as PyTorch has recorded them."""
    learner = train(new_learner(world, name, "task", batch_norm=batch_norm), 0, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        learner.step({task: batch(task, 8) for task in ("b", "c")})
    events = sorted(profile.events() or [], key=lambda event: event.time_range.start)
    return [event.name.removeprefix("c10d::").strip("_") for event in events if event.name.startswith("c10d::")]


def with_other_batches(world: World) -> None:
    learner = new_learner(world, "er", "task")
    learner.add_task("a", classes=2)
    learner.step({"a": batch("a", world.rank)})


def with_other_backbones(world: World) -> None:
    learner = Learner(nn.Linear(6, 4 + world.rank), make_method("er"), distributed=world)
    learner.add_task("a", classes=2)
    learner.step({"a": batch("a", 0)})


def with_other_heads(world: World) -> None:
    learner = new_learner(world, "er", "task")
    torch.manual_seed(world.rank)
    learner.add_task("a", head=nn.Linear(5, 2), loss=nn.functional.cross_entropy)
    learner.step({"a": batch("a", 0)})


def idle(world: World) -> str | None:
    """Return the warning after many steps of a single task."""
    learner = Learner(new_backbone(batch_norm=False), make_method("er"), distributed=world)
    learner.add_task("a", classes=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(60):
            learner.step({"a": batch("a", step)})
    return str(found[0].message) if found else None


def run(world: World | None, settings: RunSettings, out: Path, seed_by_rank: bool = False) -> Any:
    if seed_by_rank and world is not None:
        settings = settings.model_copy(update={"seed": world.rank})
    with single_precision():
        return execute(settings, out, resume=True, distributed=world).model_dump(exclude={"environment", "seconds"})
