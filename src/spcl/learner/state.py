"""State of a learner's parts as plain data and tensors."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spcl.memory
from spcl.checkpoint import write_checkpoint
from spcl.distributed.sharded import sharded_like, whole
from spcl.engine.averaging import WeightAverage
from spcl.engine.base import Engine
from spcl.engine.model import SharedModel
from spcl.errors import CheckpointError, SpclError
from spcl.learner.admission import check_method
from spcl.learner.modules import check_fits, check_same, uncompiled
from spcl.learner.optimizer import (
    MakeOptimizer,
    add_head,
    optimizer_state,
    restore_optimizer,
    saved_optimizer,
    shared_groups,
)
from spcl.learner.predictors import PredictionHeads
from spcl.learner.random_state import random_state, set_random_state
from spcl.learner.task_state import Heads, Losses, restore_heads, restore_tasks, task_state
from spcl.memory import Memory
from spcl.methods import make_method, recorded_settings
from spcl.methods.base import Method

__all__ = [
    "Parts",
    "Stateful",
    "check_source_names",
    "check_state",
    "model_state",
    "parts_state",
    "restore_parts",
    "saved_parts",
    "saved_trainable",
    "trainable_names",
    "write_state",
]

MODEL = frozenset({"learner", "tasks", "backbone", "method"})
TRAINING = frozenset({"optimizer", "memory", "random", "sources"})
OLD = 1 << 20  # updates of an average whose number is not known


class Stateful(Protocol):
    """Anything whose state is plain data and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        ...


def check_state(state: Mapping[str, Any], backbone: nn.Module, sources: Iterable[str]) -> None:
    """Refuse a state that is not that of a learner, or of its model, with this backbone and these sources."""
    parts = MODEL | TRAINING if TRAINING & state.keys() else MODEL
    if missing := sorted(parts - state.keys()):
        raise CheckpointError(f"the checkpoint is not that of a learner: it has no {', '.join(missing)}")
    check_fits("the backbone", uncompiled(backbone), state["backbone"])
    saved = state.get("sources", {})
    for name in sources:
        if name not in saved:
            raise CheckpointError(f"the checkpoint holds no source {name!r}; it has {sorted(saved)}")


def check_source_names(load: Callable[..., object], names: Iterable[str]) -> None:
    """Refuse to save sources under names that are arguments of ``load``."""
    parameters = inspect.signature(load).parameters.values()
    reserved = {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    reserved -= {"schedule"}  # PyTorch's schedules may be saved so: load cannot restore them in any case
    for name in names:
        if name in reserved:
            raise SpclError(f"a source cannot be saved as {name!r}, because load({name}=…) is the learner's own")


class Parts(NamedTuple):
    """The parts of a learner that have a state."""

    model: SharedModel
    optimizer: Optimizer
    method: Method
    memory: Memory | None
    average: WeightAverage | None
    engine: Engine
    heads: PredictionHeads


def parts_state(parts: Parts) -> dict[str, Any]:
    """Return the state of a learner's parts, and of the global random number generators."""
    return (
        model_state(parts)
        | {
            "optimizer": optimizer_state(parts.optimizer),
            "memory": _memory_state(parts.memory),
            "random": random_state(),
        }
        | ({"engine": parts.engine.state_dict()} if parts.engine.state_dict() else {})
    )


def model_state(parts: Parts) -> dict[str, Any]:
    """Return the state of the parts that make up the model: tasks with their heads, backbone and method."""
    return {
        "tasks": [task_state(task) for task in parts.model.tasks.values()],
        "backbone": uncompiled(parts.model.backbone).state_dict(),
        "method": _method_state(parts.method),
        **({} if parts.average is None else _average_state(parts.average, parts.model)),
        **({} if parts.heads.are_trained else {"prediction": parts.heads.state_dict()}),
    }


def write_state(
    path: str | os.PathLike[str], state: Mapping[str, Any], sources: Mapping[str, Stateful], writes: bool
) -> None:
    """Write a checkpoint, if this rank is the one that writes; all of them gather what is sharded."""
    state = whole(state, keep=writes)
    if writes:
        write_checkpoint(path, {**state, "sources": {name: each.state_dict() for name, each in sources.items()}})


def saved_parts(
    state: Mapping[str, Any], method: Method | None, optimizer: MakeOptimizer | None, memory: Memory | None
) -> dict[str, Any]:
    """Return method, optimiser and memory as arguments of a learner: those given, or new ones as they were saved."""
    return {
        "method": _saved_method(state["method"], method),
        "optimizer": optimizer or (saved_optimizer(state["optimizer"]) if "optimizer" in state else None),
        "memory": _saved_memory(state.get("memory")) if memory is None else memory,
    }


def restore_parts(
    parts: Parts, state: Mapping[str, Any], heads: Heads, losses: Losses, sources: Mapping[str, Stateful]
) -> None:
    """Restore the parts of a new learner and the sources saved with it; the backbone changes when all others fit.

    Where the state is that of a model alone, the optimiser is new and the memory empty.
    """
    model = parts.model
    restore_tasks(model, state["tasks"], heads, losses)
    if state["learner"]["feature_dim"] is not None:
        model.build_heads(state["learner"]["feature_dim"])
    restore_heads(model.tasks, state["tasks"])
    _restore_groups(parts.optimizer, model.backbone, state["learner"].get("trainable"))
    if state.keys() >= TRAINING:
        restore_optimizer(parts.optimizer, state["optimizer"], model.tasks)
        _restore_memory(parts.memory, state["memory"])
    else:
        _admit_tasks(parts)
    parts.method.load_state_dict(state["method"]["state"])
    if parts.average is not None:
        _restore_average(parts.average, model, state["average"], state.get("average_updates", {}))
    if "prediction" in state:
        parts.heads.load_state_dict(state["prediction"], model, are_current="memory" not in state)
    for name, source in sources.items():
        source.load_state_dict(state["sources"][name])
    backbone = uncompiled(model.backbone)
    backbone.load_state_dict(sharded_like(state["backbone"], backbone.state_dict()))
    parts.engine.load_state_dict(state.get("engine", {}))
    if "random" in state:
        set_random_state(state["random"])


def _admit_tasks(parts: Parts) -> None:
    """Add the heads of restored tasks to a new optimiser, and start the unfinished ones in an empty memory."""
    for task in parts.model.tasks.values():
        if task.head is not None:
            add_head(parts.optimizer, task)
        if parts.memory is not None and not task.finished:  # a finished one would get a share of the budget
            parts.memory.start(task.name, task.classes)


# -- trained parameters and their averages


def trainable_names(optimizer: Optimizer, backbone: nn.Module) -> list[list[str]]:
    """Return the names of the backbone's parameters in every group of the optimiser but that of the heads."""
    names = {parameter: name for name, parameter in uncompiled(backbone).named_parameters()}
    return [[names[each] for each in group["params"] if each in names] for group in shared_groups(optimizer)]


def saved_trainable(state: Mapping[str, Any], backbone: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that were trained, or those that are trainable here if the checkpoint does not say."""
    groups = state["learner"].get("trainable")
    if groups is None:
        return [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    return [uncompiled(backbone).get_parameter(name) for names in groups for name in names]


def _restore_groups(optimizer: Optimizer, backbone: nn.Module, names: Sequence[Sequence[str]] | None) -> None:
    """Distribute the backbone's parameters over the groups as they were; by default as they are."""
    groups = shared_groups(optimizer)
    if names is not None and len(names) == len(groups):
        known = set(backbone.parameters())
        for group, its_names in zip(groups, names, strict=True):
            own = [uncompiled(backbone).get_parameter(name) for name in its_names]
            group["params"] = own + [each for each in group["params"] if each not in known]


def _averaged_modules(model: SharedModel) -> dict[str, nn.Module]:
    heads = {f"head of {task.name}": task.head for task in model.tasks.values() if task.head is not None}
    return {"backbone": uncompiled(model.backbone)} | heads


def _average_state(average: WeightAverage, model: SharedModel) -> dict[str, Any]:
    """Return the averages of backbone and heads by name, and their numbers of updates."""
    owners, updates = _averaged_modules(model), average.updates
    return {
        "average": {owner: _averages_of(average, module) for owner, module in owners.items()},
        "average_updates": {owner: updates.get(module, 0) for owner, module in owners.items()},
    }


def _averages_of(average: WeightAverage, module: nn.Module) -> dict[str, Tensor]:
    known = average.averages
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: known[tensor] for name, tensor in named if tensor in known}


@torch.no_grad()
def _restore_average(
    average: WeightAverage, model: SharedModel, saved: Mapping[str, Any], updates: Mapping[str, int]
) -> None:
    """Restore the averages; earlier versions saved no buffers, and counted no updates: theirs had no warm-up."""
    owners = _averaged_modules(model)
    average.follow(owners.values(), {module: updates.get(owner, OLD) for owner, module in owners.items()})
    for owner, module in owners.items():
        here = _averages_of(average, module)
        buffers = {name: here[name] for name, _ in module.named_buffers() if name in here}
        check_same(f"the averaged {owner}", here, buffers | saved[owner])
        for name, tensor in sharded_like(saved[owner], here).items():
            here[name].copy_(tensor)


# -- method and memory


def _method_state(method: Method) -> dict[str, Any]:
    """Return a method: its name, its settings and its state."""
    return {
        "name": method.name,
        "settings": method.settings.model_dump(mode="json"),
        "state": method.state_dict(),
    }


def _saved_method(saved: Mapping[str, Any], method: Method | None) -> Method:
    """Return the given method, if it is the saved one, or a new one with the saved settings."""
    if method is not None:
        check_method(method)
    if method is not None and method.name != saved["name"]:
        raise CheckpointError(f"the checkpoint was made with the method {saved['name']!r}, not {method.name!r}")
    try:
        return method or make_method(saved["name"], **recorded_settings(saved["settings"]))
    except SpclError as error:
        raise CheckpointError(f"the checkpoint's method cannot be recreated: {error}; pass method=") from error


def _memory_state(memory: Memory | None) -> dict[str, Any] | None:
    """Return a memory: its policy, its budget and its content."""
    if memory is None:
        return None
    return {
        "class": type(memory).__name__,
        "budget": memory.budget,
        "device": None if memory.device is None else str(memory.device),
        "dtype": None if memory.dtype is None else str(memory.dtype).removeprefix("torch."),
        "state": memory.state_dict(),
    }


def _saved_memory(saved: Mapping[str, Any] | None) -> Memory | None:
    """Return a new, empty memory of the saved policy and budget."""
    if saved is None:
        return None
    kind = getattr(spcl.memory, saved["class"], None)
    if kind is None:
        raise CheckpointError(f"the memory {saved['class']!r} is not one of spcl.memory; pass memory=")
    dtype = None if saved["dtype"] is None else getattr(torch, saved["dtype"])
    return kind(saved["budget"], device=saved["device"], dtype=dtype)  # type: ignore[no-any-return]


def _restore_memory(memory: Memory | None, saved: Mapping[str, Any] | None) -> None:
    """Restore the content of a memory."""
    if memory is None:
        return
    if saved is None:
        raise CheckpointError("the checkpoint holds no memory; load it without memory=")
    memory.load_state_dict(saved["state"])
