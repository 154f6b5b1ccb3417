"""The optimiser of a learner: one group of shared parameters, as the user makes it, and one of all heads."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spcl.distributed.sharded import sharded_like
from spcl.errors import CheckpointError, SpclError
from spcl.methods.base import Task

__all__ = [
    "MakeOptimizer",
    "add_head",
    "keep_trainable",
    "make_optimizer",
    "optimizer_state",
    "restore_optimizer",
    "saved_optimizer",
    "shared_groups",
]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def make_optimizer(make: MakeOptimizer, shared: list[nn.Parameter], like: Tensor) -> Optimizer:
    """Return an optimiser of the shared parameters, with an empty group for the heads.

    The group exists from the start, because a schedule must know all groups before the first step. An optimiser cannot
    be made of no parameters: where all are frozen, it is made of an empty one of the type and device of ``like``, which
    is then removed.
    """
    if not callable(make):
        raise SpclError(
            f"optimizer must make an optimiser from a list of parameters, e.g. "
            f"functools.partial(torch.optim.SGD, lr=0.1), but it is {type(make).__name__}"
        )
    optimizer = make(shared or [nn.Parameter(like.new_empty(0))])
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise SpclError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, which the gradients of several "
            f"tasks do not allow; use e.g. torch.optim.Adam or torch.optim.SGD"
        )
    if not shared:
        for group in optimizer.param_groups:
            group["params"] = []
    _head_group(optimizer)
    return optimizer


def shared_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of shared parameters: all but that of the heads."""
    return [group for group in optimizer.param_groups if "tasks" not in group]


def keep_trainable(optimizer: Optimizer, shared: Iterable[nn.Parameter]) -> None:
    """Let the groups hold those of the shared parameters that are trainable, in this order, with the state they have.

    Parameters that are in no group yet join the first one; those that are frozen lose their state.
    """
    shared = dict.fromkeys(shared)
    groups = shared_groups(optimizer)
    places = {parameter: place for place, group in enumerate(groups) for parameter in group["params"]}
    for place, group in enumerate(groups):
        kept = [each for each in shared if each.requires_grad and places.get(each, 0) == place]
        group["params"] = kept + [each for each in group["params"] if each not in shared]
    for parameter in shared:
        if not parameter.requires_grad:
            optimizer.state.pop(parameter, None)


def add_head(optimizer: Optimizer, task: Task) -> None:
    """Add the parameters of a task's head to the group of the heads."""
    assert task.head is not None
    heads = _head_group(optimizer)
    added = [parameter for parameter in task.head.parameters() if parameter.requires_grad]
    heads["params"] += added
    if added and type(optimizer) is torch.optim.Adagrad:  # before PyTorch 2.12 it makes its state when it is made
        optimizer.state.update(torch.optim.Adagrad(added, **optimizer.defaults).state)
    heads["tasks"].append(task.name)


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimiser as plain data and tensors."""
    state = optimizer.state_dict()
    return {
        "class": type(optimizer).__name__,
        "defaults": {name: value for name, value in optimizer.defaults.items() if _is_plain(value)},
        "state": {str(index): entry for index, entry in state["state"].items()},
        "groups": state["param_groups"],
    }


def saved_optimizer(saved: Mapping[str, Any]) -> MakeOptimizer:
    """Return a factory of the saved optimiser class with its defaults."""
    kind = getattr(torch.optim, saved["class"], None)
    if kind is None:
        raise CheckpointError(f"the optimiser {saved['class']!r} is not one of torch.optim; pass optimizer=")
    known = inspect.signature(kind).parameters
    defaults = {name: value for name, value in _tuples(saved["defaults"]).items() if name in known}
    return lambda parameters: kind(parameters, **defaults)


def restore_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    """Restore the state of every parameter; the heads join the optimiser in the order in which they were made."""
    if type(optimizer).__name__ != saved["class"]:
        raise CheckpointError(
            f"the checkpoint was made with {saved['class']}, but the optimiser is {type(optimizer).__name__}"
        )
    for task in saved["groups"][-1].get("tasks", []):  # an optimiser put in later may name none
        add_head(optimizer, tasks[task])
    groups = [
        _tuples(group) | {key: group[key] for key in ("params", "tasks") if key in group} for group in saved["groups"]
    ]
    sizes = [[len(group["params"]) for group in side] for side in (groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"the checkpoint has groups of {sizes[0]} parameters, the learner of {sizes[1]}; pass the optimizer= "
            f"and freeze the parameters as before"
        )
    indices = [index for group in groups for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = dict(zip(indices, parameters, strict=True))
    entries = ((int(index), entry) for index, entry in saved["state"].items())
    state = {index: _state_like(entry, known[index]) if index in known else entry for index, entry in entries}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _state_like(entry: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the state of a parameter, sharded and laid out in memory as the parameter is.

    Fused optimisers need equal strides, and a checkpoint keeps none.
    """
    sharded = sharded_like(entry, dict.fromkeys(entry, parameter))
    return {name: _strided_like(value, parameter) for name, value in sharded.items()}


def _strided_like(value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _head_group(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimiser's last group, which has the parameters of all heads and names their tasks."""
    if "tasks" not in optimizer.param_groups[-1]:
        optimizer.add_param_group({"params": [], "tasks": []})
    return optimizer.param_groups[-1]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple, list, Tensor))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
