"""Which parameters are trained, and by which groups of the optimiser."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from spcl._util.validation import DICTS, check_content
from spcl.engine.ranks.sharded import sharded_like
from spcl.errors import CheckpointError, SpclError, did_you_mean
from spcl.tasks import Task, TaskSource


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was applied to, or the module itself."""
    return getattr(module, "_orig_mod", module)


def shares_trained(module: nn.Module, others: Iterable[nn.Module]) -> bool:
    """Return whether a module has trainable parameters of the others.

    >>> layer = nn.Linear(1, 1)
    >>> shares_trained(nn.Sequential(layer), [layer]), shares_trained(layer, [nn.Linear(1, 1)])
    (True, False)
    """
    known = {parameter for other in others for parameter in other.parameters() if parameter.requires_grad}
    return not known.isdisjoint(module.parameters())


def matching(backbone: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters whose names match any of the patterns; without patterns all.

    >>> backbone = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3))
    >>> sorted(len(parameter) for parameter in matching(backbone, ["*.bias"]))
    [2, 3]
    >>> matching(backbone, ["0.wieght"])
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: no parameter of the backbone matches '0.wieght'; did you mean '0.weight'?
    """
    named = dict(uncompiled(backbone).named_parameters())
    found: set[nn.Parameter] = set()
    for pattern in patterns or ["*"]:
        matches = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        if patterns and not matches:
            raise SpclError(f"no parameter of the backbone matches {pattern!r}; {did_you_mean(pattern, named)}")
        found.update(matches)
    return found


@contextmanager
def trainable(backbone: nn.Module, chosen: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make exactly these parameters trainable; undo it if the block raises."""
    chosen = set(chosen)
    before = {parameter: parameter.requires_grad for parameter in backbone.parameters()}
    try:
        for parameter in before:
            parameter.requires_grad_(parameter in chosen and parameter.is_floating_point())
        yield
    except BaseException:
        for parameter, was_trainable in before.items():
            parameter.requires_grad_(was_trainable)
        raise


def frozen_normalisations(backbone: nn.Module) -> list[nn.Module]:
    """Return the layers with running statistics whose own parameters are all frozen.

    Layers without parameters count as frozen if the whole backbone is.
    """
    all_frozen = not any(parameter.requires_grad for parameter in backbone.parameters())
    layers = [module for module in backbone.modules() if isinstance(module, _NormBase)]
    return [layer for layer in layers if _is_frozen(layer, all_frozen)]


def _is_frozen(layer: nn.Module, if_without_parameters: bool) -> bool:
    flags = [parameter.requires_grad for parameter in layer.parameters(recurse=False)]
    return not any(flags) if flags else if_without_parameters


MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def optimizer_of(make: MakeOptimizer, shared: list[nn.Parameter], like: Tensor) -> Optimizer:
    """Return an optimiser of the shared parameters, with an empty group for heads and encoders.

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
    """Return all groups except the heads' group."""
    return [group for group in optimizer.param_groups if "tasks" not in group]


def keep_trainable(optimizer: Optimizer, shared: Iterable[nn.Parameter], removed: Iterable[nn.Parameter] = ()) -> None:
    """Put the trainable shared parameters into the groups, in this order, keeping their optimiser state.

    Parameters in no group join the first group; frozen and removed parameters lose their state.
    """
    shared, removed = dict.fromkeys(shared), set(removed)
    groups = shared_groups(optimizer)
    places = {parameter: place for place, group in enumerate(groups) for parameter in group["params"]}
    for place, group in enumerate(groups):
        kept = [each for each in shared if each.requires_grad and places.get(each, 0) == place]
        group["params"] = kept + [each for each in group["params"] if each not in shared and each not in removed]
    for parameter in (*shared, *removed):
        if parameter in removed or not parameter.requires_grad:
            optimizer.state.pop(parameter, None)


def add_head(optimizer: Optimizer, task: Task) -> None:
    """Add the parameters of a task's head to the group of heads and encoders."""
    assert task.head is not None
    _add_to_heads(optimizer, task.head, task.name)


def add_encoder(optimizer: Optimizer, source: TaskSource) -> None:
    """Add the parameters of a source's encoder to the group of heads and encoders, but for those that are there."""
    assert source.encoder is not None
    _add_to_heads(optimizer, source.encoder, [ENCODER, source.name])


ENCODER = "encoder"
"""Marks entries of the group of heads and encoders that name a source and not a task."""


def _add_to_heads(optimizer: Optimizer, module: nn.Module, entry: str | list[str]) -> None:
    heads = _head_group(optimizer)
    known = set(heads["params"])
    added = [each for each in module.parameters() if each.requires_grad and each not in known]
    heads["params"] += added
    if added and type(optimizer) is torch.optim.Adagrad:  # before PyTorch 2.12 it makes its state when it is made
        optimizer.state.update(torch.optim.Adagrad(added, **optimizer.defaults).state)
    heads["tasks"].append(entry)


def exchange_parameters(optimizer: Optimizer, before: nn.Module, after: nn.Module) -> None:
    """Put the parameters of a larger head in the places of a smaller one's; new entries of their state are zero."""
    heads = _head_group(optimizer)
    pairs = dict(zip(before.parameters(), after.parameters(), strict=True))
    heads["params"][:] = [pairs.get(each, each) for each in heads["params"]]
    for old, new in pairs.items():
        if (state := optimizer.state.pop(old, None)) is not None:
            optimizer.state[new] = {name: _grown(value, old, new) for name, value in state.items()}


def _grown(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != old.shape or old.shape == new.shape:
        return value
    larger = torch.zeros_like(new, dtype=value.dtype, device=value.device, requires_grad=False)
    larger[: len(value)] = value
    return larger


@contextmanager
def groups_undone_if_it_raises(optimizer: Optimizer) -> Iterator[None]:
    """Remove from the optimiser what the block added to the group of heads and encoders, if the block raises."""
    group = _head_group(optimizer)
    parameters, tasks = list(group["params"]), list(group["tasks"])
    try:
        yield
    except BaseException:
        for parameter in set(group["params"]).difference(parameters):
            optimizer.state.pop(parameter, None)
        group["params"][:], group["tasks"][:] = parameters, tasks
        raise


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
    check_content("the optimiser", saved, {"class": str, "defaults": dict})
    kind = getattr(torch.optim, saved["class"], None)
    if kind is None:
        raise CheckpointError(f"the optimiser {saved['class']!r} is not one of torch.optim; pass optimizer=")
    known = inspect.signature(kind).parameters
    defaults = {name: value for name, value in _tuples(saved["defaults"]).items() if name in known}
    _check_options("the optimiser's defaults", defaults, {name: each.default for name, each in known.items()})
    return lambda parameters: kind(parameters, **defaults)


def restore_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    tasks: Mapping[str, Task],
    sources: Mapping[str, TaskSource],
) -> None:
    """Restore the state of every parameter; heads and encoders join the optimiser in the order they were made."""
    _check_optimizer(saved, optimizer.defaults)
    if type(optimizer).__name__ != saved["class"]:
        raise CheckpointError(
            f"the checkpoint was made with {saved['class']}, but the optimiser is {type(optimizer).__name__}"
        )
    for entry in saved["groups"][-1].get("tasks", []):  # an optimiser put in later may name none
        if isinstance(entry, str):
            if entry not in tasks:
                raise CheckpointError(f"the optimiser has the head of task {entry!r:.80}, which the learner has not")
            add_head(optimizer, tasks[entry])
        elif len(entry) != 2 or entry[1] not in sources or sources[entry[1]].encoder is None:
            raise CheckpointError(f"the optimiser has the encoder of {entry!r:.80}, which the learner has not")
        else:
            add_encoder(optimizer, sources[entry[1]])
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
    for group in optimizer.param_groups:
        _check_group(optimizer, group)


def _check_optimizer(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise an error unless a saved optimiser has the right types, and its options the types of these defaults."""
    check_content("the optimiser", saved, {"state": dict, "groups": DICTS})
    for index, entry in saved["state"].items():
        check_content(f"the optimiser's state of parameter {index}", entry, {})
    if not saved["groups"]:
        raise CheckpointError("the optimiser has no groups in the checkpoint; use another checkpoint")
    for group in saved["groups"]:
        known = {"params": list[int], "tasks": list[str | list[str]]}
        check_content("a group of the optimiser", group, {name: known[name] for name in known if name in group})
        _check_options("a group of the optimiser", group, defaults)


def _check_options(part: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise an error unless options are numbers, flags or tuples of numbers where their defaults are."""
    number = Real | Tensor
    for name, default in defaults.items():
        if name not in options:
            continue
        if isinstance(default, bool):
            check_content(part, options, {name: bool})
        elif default is None and name in ("foreach", "fused"):
            check_content(part, options, {name: bool | None})
        elif isinstance(default, Real):
            check_content(part, options, {name: number})
        elif isinstance(default, tuple) and all(isinstance(each, Real) for each in default):
            check_content(part, options, {name: list[number]})


def _check_group(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Raise an error unless the state of a group is of the kind that PyTorch's optimiser makes in a step.

    The fused optimisers read and write tensors of a wrong size beyond their ends.
    """
    kind, with_state = type(optimizer), [each for each in group["params"] if each in optimizer.state]
    if not with_state or kind.__module__.partition(".")[0] != "torch" or kind is torch.optim.Adafactor:
        return
    options = {name: group[name] for name in inspect.signature(kind).parameters if name in group and name != "params"}
    small = nn.Parameter(torch.zeros(2, 3, dtype=with_state[0].dtype, device=with_state[0].device))
    small.grad = torch.zeros_like(small)
    model = kind([small], **options)
    model.step()
    plain = (value for name, value in group.items() if name not in ("params", "lr", "betas"))
    flags = [name for name, each in inspect.signature(kind).parameters.items() if isinstance(each.default, bool)]
    wrong = any(not isinstance(group.get(name, False), bool) for name in flags)
    if wrong or any(isinstance(value, Tensor) for value in plain):
        raise CheckpointError("a group of the optimiser has options of a wrong type; use another checkpoint")
    if missing := sorted(model.param_groups[0].keys() - group.keys()):
        raise CheckpointError(f"a group of the optimiser has no {', '.join(missing)}; use another checkpoint")
    for parameter in with_state:
        state = optimizer.state[parameter]
        for name, value in {**dict.fromkeys(state), **model.state[small]}.items():
            shape = parameter.shape if isinstance(value, Tensor) and value.shape == small.shape else ()
            found = state.get(name)
            if name not in model.state[small] or isinstance(found, Tensor) != isinstance(value, Tensor):
                raise CheckpointError(
                    f"the optimiser's state has a wrong {name!r} for a parameter; use another checkpoint"
                )
            if isinstance(found, Tensor) and found.shape != shape:
                raise CheckpointError(
                    f"the optimiser's {name!r} has the shape {list(found.shape)}, but its parameter {list(shape)}; use "
                    f"another checkpoint"
                )


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
    """Return the optimiser's last group, which has the parameters of heads and encoders, and names their owners."""
    if "tasks" not in optimizer.param_groups[-1]:
        optimizer.add_param_group({"params": [], "tasks": []})
    return optimizer.param_groups[-1]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple, list, Tensor))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
