"""A learner as plain data and tensors, and back."""

import inspect
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spcl.memory
from spcl.errors import CheckpointError, SpclError
from spcl.memory import Memory
from spcl.methods import make_method
from spcl.methods.base import Loss, Method, Task, classifier_task, describe

if TYPE_CHECKING:
    from spcl.learner.learner import Learner

__all__ = ["Stateful", "learner_state", "restored"]

L = TypeVar("L", bound="Learner")


class Stateful(Protocol):
    """Anything whose state is plain data and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state back."""
        ...


def learner_state(learner: "Learner") -> dict[str, Any]:
    """Everything that decides how the learner goes on."""
    return {
        "learner": {
            "scenario": learner.scenario,
            "memory_batch": learner.memory_batch,
            "autocast": learner.model.autocast is not None,
            "measure_stability": learner.measure_stability,
            "capture": learner.capture,
            "seed": learner.seed,
            "steps": learner.steps,
            "feature_dim": learner.model.feature_dim,
        },
        "tasks": [
            {
                "name": task.name,
                "classes": task.classes,
                "finished": task.finished,
                "signature": task.signature,
                "left_out": task.skipped,
                "left_out_in_a_row": task.skipped_in_a_row,
                "head": None if task.head is None else task.head.state_dict(),
            }
            for task in learner.tasks.values()
        ],
        "backbone": _uncompiled(learner.model.backbone).state_dict(),
        "optimizer": _optimizer_state(learner.optimizer),
        "method": {
            "name": learner.method.name,
            "settings": learner.method.settings.model_dump(mode="json"),
            "state": learner.method.state_dict(),
        },
        "memory": None if learner.memory is None else _memory_state(learner.memory),
        "random": random_state(),
    }


def restored(
    cls: type[L],
    saved: Mapping[str, Any],
    backbone: nn.Module,
    method: Method | None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
    memory: Memory | None,
    heads: Mapping[str, tuple[nn.Module, Loss]],
    sources: Mapping[str, Stateful],
) -> L:
    """The learner that :func:`learner_state` describes; the backbone is changed only when all of it fits."""
    _check_is_learner(saved)
    _check_fits("the backbone", _uncompiled(backbone), saved["backbone"])
    for name in sources:
        if name not in saved["sources"]:
            raise CheckpointError(f"the checkpoint holds no source {name!r}; it has {sorted(saved['sources'])}")
    settings = saved["learner"]
    learner = cls(
        backbone,
        _chosen_method(method, saved["method"]),
        optimizer=optimizer or _optimizer_maker(saved["optimizer"]),
        memory=memory if memory is not None else _make_memory(saved["memory"]),
        scenario=settings["scenario"],
        memory_batch=settings["memory_batch"],
        autocast=torch.bfloat16 if settings["autocast"] else None,
        measure_stability=settings["measure_stability"],
        capture=settings["capture"],
        seed=settings["seed"],
    )
    learner.steps = settings["steps"]
    _restore_tasks(learner, saved["tasks"], heads, settings["feature_dim"])
    _restore_optimizer(learner, saved["optimizer"])
    learner.method.load_state_dict(saved["method"]["state"])
    if learner.memory is not None:
        learner.memory.load_state_dict(_saved_memory(saved["memory"])["state"])
    for name, source in sources.items():
        source.load_state_dict(saved["sources"][name])
    _uncompiled(backbone).load_state_dict(saved["backbone"])
    set_random_state(saved["random"])
    return learner


def _check_is_learner(saved: Mapping[str, Any]) -> None:
    expected = {"learner", "tasks", "backbone", "optimizer", "method", "memory", "random", "sources"}
    if missing := sorted(expected - saved.keys()):
        raise CheckpointError(f"the checkpoint is not that of a learner: it has no {', '.join(missing)}")


def _restore_tasks(
    learner: "Learner",
    tasks: list[dict[str, Any]],
    heads: Mapping[str, tuple[nn.Module, Loss]],
    feature_dim: int | None,
) -> None:
    _check_apart(learner.model.backbone, heads)
    for saved in tasks:
        learner.tasks[saved["name"]] = _restored_task(saved, heads, len(learner.classes), learner.model.device)
    if feature_dim is not None:
        learner.model.build_heads(feature_dim)
    for saved in tasks:
        head = learner.tasks[saved["name"]].head
        if head is not None:
            _check_fits(f"the head of task {saved['name']!r}", head, saved["head"])
            head.load_state_dict(saved["head"])


def _check_apart(backbone: nn.Module, heads: Mapping[str, tuple[nn.Module, Loss]]) -> None:
    known = set(backbone.parameters())
    for name, (head, _) in heads.items():
        parameters = set(head.parameters())
        if known & parameters:
            raise CheckpointError(f"the head of task {name!r} shares parameters with the backbone or another head")
        known |= parameters


def _restored_task(
    saved: Mapping[str, Any], heads: Mapping[str, tuple[nn.Module, Loss]], offset: int, device: torch.device
) -> Task:
    name = saved["name"]
    if saved["classes"] is not None:
        task = classifier_task(name, saved["classes"], offset)
    elif name in heads:
        head, loss = heads[name]
        task = Task(name, None, loss, head.to(device), 0)
    else:
        raise CheckpointError(
            f"task {name!r} was added with a head and loss of its own; pass them as heads={{{name!r}: (head, loss)}}"
        )
    task.finished = saved["finished"]
    task.signature = None if saved["signature"] is None else tuple(saved["signature"])
    task.skipped, task.skipped_in_a_row = saved["left_out"], saved["left_out_in_a_row"]
    return task


def _uncompiled(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def _check_fits(what: str, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    here = {name: describe(tensor) for name, tensor in module.state_dict().items()}
    there = {name: describe(tensor) for name, tensor in saved.items()}
    if here != there:
        names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        first = names[0]
        raise CheckpointError(
            f"{what} does not fit the checkpoint in {len(names)} tensors, e.g. {first!r}: "
            f"{here.get(first, 'missing')} here, {there.get(first, 'missing')} in the checkpoint"
        )


# -- optimiser


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    return {
        "class": type(optimizer).__name__,
        "defaults": {name: value for name, value in optimizer.defaults.items() if _is_plain(value)},
        "state": {str(index): entry for index, entry in state["state"].items()},
        "groups": state["param_groups"],
    }


def _optimizer_maker(saved: Mapping[str, Any]) -> Callable[[list[nn.Parameter]], Optimizer]:
    kind = getattr(torch.optim, saved["class"], None)
    if kind is None:
        raise CheckpointError(f"the optimiser {saved['class']!r} is not one of torch.optim; pass optimizer=")
    known = inspect.signature(kind).parameters
    defaults = {name: value for name, value in _tuples(saved["defaults"]).items() if name in known}
    return lambda parameters: kind(parameters, **defaults)


def _restore_optimizer(learner: "Learner", saved: Mapping[str, Any]) -> None:
    """Give every parameter its state back; the heads joined the optimiser in the order in which they were made."""
    if type(learner.optimizer).__name__ != saved["class"]:
        raise CheckpointError(
            f"the checkpoint was made with {saved['class']}, but the optimiser is {type(learner.optimizer).__name__}"
        )
    for task in saved["groups"][-1].get("tasks", []):  # an optimiser put in later may name none
        learner._optimise(learner.tasks[task])
    groups = [
        _tuples(group) | {key: group[key] for key in ("params", "tasks") if key in group} for group in saved["groups"]
    ]
    sizes = [[len(group["params"]) for group in side] for side in (groups, learner.optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"the checkpoint has groups of {sizes[0]} parameters, the learner of {sizes[1]}; pass the optimizer= "
            f"and freeze the parameters as before"
        )
    state = {int(index): entry for index, entry in saved["state"].items()}
    learner.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple, list, Tensor))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# -- method and memory


def _chosen_method(method: Method | None, saved: Mapping[str, Any]) -> Method:
    if method is not None and method.name != saved["name"]:
        raise CheckpointError(f"the checkpoint was made with the method {saved['name']!r}, not {method.name!r}")
    try:
        return method or make_method(saved["name"], **saved["settings"])
    except SpclError as error:
        raise CheckpointError(f"the checkpoint's method cannot be made anew: {error}; pass method=") from error


def _memory_state(memory: Memory) -> dict[str, Any]:
    return {
        "class": type(memory).__name__,
        "budget": memory.budget,
        "device": None if memory.device is None else str(memory.device),
        "dtype": None if memory.dtype is None else str(memory.dtype).removeprefix("torch."),
        "state": memory.state_dict(),
    }


def _saved_memory(saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if saved is None:
        raise CheckpointError("the checkpoint holds no memory; load it without memory=")
    return saved


def _make_memory(saved: Mapping[str, Any] | None) -> Memory | None:
    if saved is None:
        return None
    kind = getattr(spcl.memory, saved["class"], None)
    if kind is None:
        raise CheckpointError(f"the memory {saved['class']!r} is not one of spcl.memory; pass memory=")
    dtype = None if saved["dtype"] is None else getattr(torch, saved["dtype"])
    return kind(saved["budget"], device=saved["device"], dtype=dtype)  # type: ignore[no-any-return]


# -- random numbers


def random_state() -> dict[str, Any]:
    """The state of every global generator a model, its data or its methods may draw from."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def set_random_state(saved: Mapping[str, Any]) -> None:
    """Set back what :func:`random_state` gave."""
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(saved["cuda"]):
        torch.cuda.set_rng_state_all(saved["cuda"])
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
