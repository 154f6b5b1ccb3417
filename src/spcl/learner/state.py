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
from spcl.errors import CheckpointError
from spcl.learner.method import Method
from spcl.learner.tasks import Loss
from spcl.memory import Memory

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
                "left_out": task.left_out,
                "left_out_in_a_row": task.left_out_in_a_row,
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
    _check_fits(_uncompiled(backbone), saved["backbone"])
    for name in sources:
        if name not in saved["sources"]:
            raise CheckpointError(f"the checkpoint holds no source {name!r}; it has {sorted(saved['sources'])}")
    settings = saved["learner"]
    learner = cls(
        backbone,
        method or _make_method(saved["method"]),
        optimizer=optimizer or _optimizer_maker(saved["optimizer"]),
        memory=memory or _make_memory(saved["memory"]),
        scenario=settings["scenario"],
        memory_batch=settings["memory_batch"],
        autocast=torch.bfloat16 if settings["autocast"] else None,
        measure_stability=settings["measure_stability"],
        seed=settings["seed"],
    )
    _restore_tasks(learner, saved["tasks"], heads, settings["feature_dim"])
    _uncompiled(backbone).load_state_dict(saved["backbone"])
    _restore_optimizer(learner.optimizer, saved["optimizer"])
    learner.method.load_state_dict(saved["method"]["state"])
    if learner.memory is not None:
        learner.memory.load_state_dict(saved["memory"]["state"])
    learner.steps = settings["steps"]
    for name, source in sources.items():
        source.load_state_dict(saved["sources"][name])
    set_random_state(saved["random"])
    return learner


def _restore_tasks(
    learner: "Learner",
    tasks: list[dict[str, Any]],
    heads: Mapping[str, tuple[nn.Module, Loss]],
    feature_dim: int | None,
) -> None:
    for saved in tasks:
        if saved["classes"] is not None:
            learner.add_task(saved["name"], classes=saved["classes"])
        elif saved["name"] in heads:
            head, loss = heads[saved["name"]]
            learner.add_task(saved["name"], head=head, loss=loss)
        else:
            raise CheckpointError(
                f"task {saved['name']!r} was added with a head and loss of its own; "
                f"pass them as heads={{{saved['name']!r}: (head, loss)}}"
            )
        if feature_dim is not None and saved["head"] is not None:
            learner._build_heads(feature_dim)
        task = learner.tasks[saved["name"]]
        task.finished = saved["finished"]
        task.signature = None if saved["signature"] is None else tuple(saved["signature"])
        task.left_out, task.left_out_in_a_row = saved["left_out"], saved["left_out_in_a_row"]
        if saved["head"] is not None and task.head is not None:
            _check_fits(task.head, saved["head"])
            task.head.load_state_dict(saved["head"])


def _uncompiled(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def _check_fits(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    here = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if here != there:
        names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        first = names[0]
        raise CheckpointError(
            f"the module does not fit the checkpoint in {len(names)} tensors, e.g. {first!r}: "
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


def _restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    groups = [{**_tuples(group), "params": group["params"]} for group in saved["groups"]]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(groups)} groups of parameters, the learner {len(optimizer.param_groups)}"
        )
    state = {int(index): entry for index, entry in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple, list, Tensor))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# -- method and memory


def _make_method(saved: Mapping[str, Any]) -> Method:
    from spcl.methods import make_method  # the recipes know the learner, not the other way round

    return make_method(saved["name"], **saved["settings"])


def _memory_state(memory: Memory) -> dict[str, Any]:
    return {
        "class": type(memory).__name__,
        "budget": memory.budget,
        "device": None if memory.device is None else str(memory.device),
        "dtype": None if memory.dtype is None else str(memory.dtype).removeprefix("torch."),
        "state": memory.state_dict(),
    }


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
