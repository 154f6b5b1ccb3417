"""The state of a learner's parts as plain data and tensors, and checkpoints of it."""

import inspect
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import spcl.memory
from spcl._util.validation import DICTS, check_content
from spcl.batches import describe
from spcl.checkpoint import write_checkpoint
from spcl.encoders import ENCODERS
from spcl.engine.base import Engine, Stateful
from spcl.engine.model import SharedModel
from spcl.engine.ranks.sharded import sharded_like, whole
from spcl.engine.update import WeightAverage
from spcl.errors import CheckpointError, SpclError, did_you_mean
from spcl.learner.checks import check_is_method, classifier_task, start_in_memory
from spcl.learner.parameters import (
    MakeOptimizer,
    add_encoder,
    add_head,
    optimizer_state,
    restore_optimizer,
    saved_optimizer,
    shared_groups,
    shares_trained,
    uncompiled,
)
from spcl.learner.predictors import PredictionHeads
from spcl.losses import CrossEntropy, Loss
from spcl.memory import Memory
from spcl.methods import make_method, recorded_settings
from spcl.methods.base import Method
from spcl.options import LearnerOptions, restored_options
from spcl.tasks import Task, TaskSource

Heads = Mapping[str, tuple[nn.Module, Loss]]
Encoders = Mapping[str, nn.Module]
Losses = Mapping[str, Loss]


def task_state(task: Task) -> dict[str, Any]:
    """Return a task and the weights of its head; of its sources, what a task that is its own only source needs."""
    return {
        "name": task.name,
        "classes": task.classes,
        "finished": task.finished,
        "signature": task.signature,
        "left_out": task.skipped,  # keys of existing files
        "left_out_in_a_row": max((source.skipped_in_a_row for source in task.sources.values()), default=0),
        "head": None if task.head is None else task.head.state_dict(),
        **({} if task.class_names is None else {"class_names": list(task.class_names)}),
        **({} if task.classes is None or task.loss is cross_entropy else {"loss": _loss_state(task.loss)}),
    }


def source_states(model: SharedModel) -> list[dict[str, Any]]:
    """Return the sources in their order; an empty list if each is the only source of the task of its name.

    Encoders are saved with the first source that has them; others name that source.
    """
    sources = list(model.sources.values())
    if all(source.is_implied for source in sources) and len(sources) == len(model.tasks):
        return []
    owners: dict[nn.Module, str] = {}
    for source in sources:
        if source.encoder is not None:
            owners.setdefault(source.encoder, source.name)
    return [
        {
            "name": source.name,
            "task": source.task.name,
            "batch": source.batch,
            "finished": source.finished,
            "implied": source.is_implied,
            "signature": source.signature,
            "skipped": source.skipped,
            "skipped_in_a_row": source.skipped_in_a_row,
            "encoder_name": source.encoder_name,
            "encoder_of": None if source.encoder is None else owners[source.encoder],
            "encoder": source.encoder.state_dict()
            if source.encoder is not None and owners[source.encoder] == source.name
            else None,
        }
        for source in sources
    ]


def restore_sources(model: SharedModel, state: Mapping[str, Any], encoders: Encoders) -> None:
    """Add the sources of :func:`source_states` to a model with all tasks; weights of encoders are still missing."""
    saved = state.get("task_sources") or [
        {
            "name": each["name"],
            "task": each["name"],
            "batch": each["name"],
            "finished": each["finished"],
            "implied": True,
        }
        | {"signature": each["signature"], "skipped": each["left_out"], "skipped_in_a_row": each["left_out_in_a_row"]}
        | {"encoder_name": None, "encoder_of": None, "encoder": None}
        for each in state["tasks"]
    ]
    encoders = _given_encoders(saved, encoders)
    for entry in saved:
        source = TaskSource(entry["name"], model.tasks[entry["task"]], encoder_name=entry["encoder_name"])
        source.batch, source.is_implied, source.finished = entry["batch"], entry["implied"], entry["finished"]
        source.skipped, source.skipped_in_a_row = entry["skipped"], entry["skipped_in_a_row"]
        source.signature = None if entry["signature"] is None else tuple(entry["signature"])
        source.encoder = _restored_encoder(model, entry, encoders)
        model.add_source(source)


def _given_encoders(saved: Sequence[Mapping[str, Any]], encoders: Encoders) -> Encoders:
    """Return the given encoders by the source that each was saved with.

    An encoder may be given for any of the sources that have it, by the name of a source or of its batches. Others, of
    sources that had not joined, are of no use yet.
    """
    found: dict[str, nn.Module] = {}
    missing = []
    for entry in saved:
        owner = entry["encoder_of"]
        if owner is None:
            continue
        sharing = [each for each in saved if each["encoder_of"] == owner]
        names = [name for each in sharing for name in (each["name"], each["batch"])]
        given = {name: encoders[name] for name in names if name in encoders}
        if len(set(map(id, given.values()))) > 1:
            raise CheckpointError(
                f"sources {', '.join(map(repr, given))} had one encoder; pass the same module for all"
            )
        if given:
            found[owner] = next(iter(given.values()))
        elif owner == entry["name"] and entry["encoder_name"] is None:
            missing.append(entry["batch"])
    if missing:
        wanted = ", ".join(f"{name!r}: module" for name in dict.fromkeys(missing))
        raise CheckpointError(f"sources have encoders of their own; pass them as encoders={{{wanted}}}")
    return found


def _restored_encoder(model: SharedModel, saved: Mapping[str, Any], encoders: Encoders) -> nn.Module | None:
    """Return the encoder of a source: made again if it had a name, else the given one."""
    name, owner = saved["name"], saved["encoder_of"]
    if owner is None:
        return None
    if owner != name:
        return model.sources[owner].encoder
    if saved["encoder_name"] is not None:
        inputs = _inputs_like(saved["signature"][0])
        encoder: nn.Module = ENCODERS.make(saved["encoder_name"], inputs)
        return encoder.to(model.device, model.dtype)
    if not isinstance(encoders[name], nn.Module) or shares_trained(encoders[name], [model.backbone, *model.heads()]):
        raise CheckpointError(f"encoders[{name!r}] must be a module that shares no parameters with backbone or heads")
    return encoders[name].to(model.device)


def _inputs_like(signature: str) -> Tensor:
    """Return no inputs of the described kind.

    >>> _inputs_like("float32[3, 8]").shape
    torch.Size([0, 3, 8])
    """
    kind, _, shape = signature.removesuffix("]").partition("[")
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype) or not all(size.strip().isdigit() for size in shape.split(",") if size):
        raise CheckpointError(f"samples of {signature!r:.80} are not tensors; use another checkpoint")
    return torch.empty(0, *(int(size) for size in shape.split(",") if size), dtype=dtype)


def restore_encoders(model: SharedModel, state: Mapping[str, Any]) -> None:
    """Restore the weights of all encoders."""
    for entry in state.get("task_sources", []):
        encoder = model.sources[entry["name"]].encoder
        if encoder is not None and entry["encoder"] is not None:
            check_fits(f"the encoder of source {entry['name']!r}", encoder, entry["encoder"])
            encoder.load_state_dict(entry["encoder"])


def restore_tasks(model: SharedModel, saved: list[dict[str, Any]], heads: Heads, losses: Losses) -> None:
    """Add the tasks of :func:`task_state` to a model without any; the heads of classifiers are still missing."""
    _check_losses(saved, losses)
    for entry in saved:
        offset = sum(task.classes or 0 for task in model.tasks.values())
        task = _restored_task(entry, heads, losses, offset, model.device)
        if task.head is not None and shares_trained(task.head, model.modules()):
            raise CheckpointError(f"the head of task {task.name!r} shares parameters with the backbone or another head")
        model.tasks[task.name] = task


def restore_heads(tasks: Mapping[str, Task], saved: list[dict[str, Any]]) -> None:
    """Restore the weights of all heads."""
    for entry in saved:
        head = tasks[entry["name"]].head
        if head is not None:
            check_fits(f"the head of task {entry['name']!r}", head, entry["head"])
            head.load_state_dict(entry["head"])


def _loss_state(loss: Loss) -> dict[str, Any] | None:
    """Return a cross-entropy as plain data; None for other losses of classifiers, which are not saved."""
    if not isinstance(loss, CrossEntropy):
        return None
    weights = loss.class_weights
    return {
        "label_smoothing": loss.label_smoothing,
        "class_weights": None if weights is None else list(weights),
    }


def _check_losses(saved: list[dict[str, Any]], losses: Losses) -> None:
    classifiers = [entry["name"] for entry in saved if entry["classes"] is not None]
    for name in losses:
        if name not in classifiers:
            raise CheckpointError(f"losses has {name!r}, but the checkpoint's classifiers are {classifiers}")


def _restored_task(saved: Mapping[str, Any], heads: Heads, losses: Losses, offset: int, device: torch.device) -> Task:
    """Return a task of :func:`task_state`."""
    name = saved["name"]
    if saved["classes"] is not None:
        names = saved.get("class_names")
        loss = losses[name] if name in losses else _restored_loss(saved)
        task = classifier_task(name, saved["classes"], offset, loss, None if names is None else tuple(names))
    elif name in heads:
        task = _task_of_its_own(name, heads[name], device)
    else:
        raise CheckpointError(
            f"task {name!r} was added with a head and loss of its own; pass them as heads={{{name!r}: (head, loss)}}"
        )
    return task


def _task_of_its_own(name: str, given: object, device: torch.device) -> Task:
    match given:
        case (nn.Module() as head, loss) if callable(loss):
            return Task(name, None, loss, head.to(device), 0)
    raise CheckpointError(f"heads[{name!r}] must be the pair of the task's head and loss, but it is {given!r:.80}")


def _restored_loss(saved: Mapping[str, Any]) -> Loss | None:
    """Return the loss of a classifier; None for plain cross-entropy."""
    if "loss" not in saved:
        return None
    if saved["loss"] is None:
        name = saved["name"]
        raise CheckpointError(f"task {name!r} was added with a loss of its own; pass it as losses={{{name!r}: loss}}")
    return CrossEntropy(**saved["loss"])


def random_state() -> dict[str, Any]:
    """Return the state of every global generator that a model, its data or its method may use."""
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
    """Restore the generators from :func:`random_state`."""
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(saved["cuda"]):
        torch.cuda.set_rng_state_all(saved["cuda"])
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))


MODEL = frozenset({"learner", "tasks", "backbone", "method"})
TRAINING = frozenset({"optimizer", "memory", "random", "sources"})
OLD = 1 << 20  # updates of an average whose number is not known


def check_state(state: Mapping[str, Any], backbone: nn.Module, sources: Iterable[str]) -> None:
    """Refuse a state that is not that of a learner, or of its model, with this backbone and these sources."""
    parts = MODEL | TRAINING if TRAINING & state.keys() else MODEL
    if missing := sorted(parts - state.keys()):
        raise CheckpointError(f"the checkpoint is not that of a learner: it has no {', '.join(missing)}")
    _check_content(state)
    check_fits("the backbone", uncompiled(backbone), state["backbone"])
    saved = state.get("sources", {})
    for name in sources:
        if name not in saved:
            raise CheckpointError(f"the checkpoint holds no source {name!r}; it has {sorted(saved)}")


PARTS: Mapping[str, Any] = {
    "learner": dict,
    "tasks": DICTS,
    "task_sources": DICTS,
    "backbone": dict,
    "method": dict,
    "optimizer": dict,
    "memory": dict | None,
    "random": dict,
    "sources": dict,
}
LEARNER_CONTENT: Mapping[str, Any] = {"steps": int, "feature_dim": int | None}
TASK_CONTENT: Mapping[str, Any] = {
    "name": str,
    "classes": int | None,
    "finished": bool,
    "signature": list[str] | None,
    "left_out": int,
    "left_out_in_a_row": int,
    "head": dict | None,
}
SOURCE_CONTENT: Mapping[str, Any] = {
    "name": str,
    "task": str,
    "batch": str,
    "finished": bool,
    "implied": bool,
    "signature": list[str] | None,
    "skipped": int,
    "skipped_in_a_row": int,
    "encoder_name": str | dict | None,
    "encoder_of": str | None,
    "encoder": dict | None,
}


def _check_content(state: Mapping[str, Any]) -> None:
    """Raise an error unless the plain data of a checkpoint has the right types, and heads the sizes that it says."""
    check_content("the state", state, {name: kind for name, kind in PARTS.items() if name in state})
    check_content("the learner", state["learner"], LEARNER_CONTENT)
    for number, task in enumerate(state["tasks"]):
        check_content(f"task {task.get('name', number)!r:.80}", task, TASK_CONTENT)
    _check_task_sources(state)
    try:
        LearnerOptions(**restored_options(state["learner"]))
    except SpclError as error:
        raise CheckpointError(f"{error}, but the checkpoint has it; use another checkpoint") from None
    features = state["learner"]["feature_dim"]
    for task in state["tasks"]:
        if task["signature"] is not None and len(task["signature"]) != 2:
            raise CheckpointError(
                f"signature of task {task['name']!r} is {task['signature']!r:.80} in the checkpoint, not of a "
                f"sample and a target; use another checkpoint"
            )
        numbers = sum(each.numel() for each in (task["head"] or {}).values())
        if task["classes"] is not None and features is not None and max(task["classes"], features) > numbers:
            raise CheckpointError(
                f"task {task['name']!r} has {task['classes']} classes and {features} features, but its head has "
                f"{numbers} parameters in the checkpoint; use another checkpoint"
            )
    for name, updates in state.get("average_updates", {}).items():
        if not isinstance(updates, int):
            raise CheckpointError(f"the average of the {name} has {updates!r:.80} updates; use another checkpoint")


def _check_task_sources(state: Mapping[str, Any]) -> None:
    """Raise an error unless sources have the tasks and encoders of the checkpoint."""
    tasks, known = {task["name"] for task in state["tasks"]}, dict[str, Any]()
    for number, source in enumerate(state.get("task_sources", [])):
        check_content(f"source {source.get('name', number)!r:.80}", source, SOURCE_CONTENT)
        name, owner, signature = source["name"], source["encoder_of"], source["signature"] or ("", "")
        known[name] = source
        if source["task"] not in tasks or (owner is not None and (owner not in known or not known[owner]["encoder"])):
            raise CheckpointError(
                f"source {name!r} has the task {source['task']!r} and the encoder of {owner!r}, but the checkpoint "
                f"does not; use another checkpoint"
            )
        if len(signature) != 2:
            raise CheckpointError(f"the signature of source {name!r} is {signature!r:.80}; use another checkpoint")


def check_sources(call: Callable[..., object], load: Callable[..., object], sources: Mapping[str, Stateful]) -> None:
    """Refuse sources without a state, such as misspelt options, and sources named like an argument of ``load``.

    Args:
        call: the method that sources were given to by name, beside its own options.
        load: the method that restores them by name.
        sources: what was given.
    """
    reserved = _keywords(load) - {"schedule"}  # PyTorch's schedules may be saved so: load cannot restore them anyway
    for name, source in sources.items():
        if not all(callable(getattr(source, each, None)) for each in ("state_dict", "load_state_dict")):
            raise SpclError(
                f"{call.__name__} has no option {name!r}, and a source of type {type(source).__name__} cannot be saved "
                f"along, as it has no state_dict and load_state_dict; {did_you_mean(name, sorted(_keywords(call)))}"
            )
        if name in reserved:
            raise SpclError(f"a source cannot be saved as {name!r}, because load({name}=…) is the learner's own")


def _keywords(function: Callable[..., object]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


class SavedParts(NamedTuple):
    """The parts of a learner that have a state."""

    model: SharedModel
    optimizer: Optimizer
    method: Method
    memory: Memory | None
    average: WeightAverage | None
    engine: Engine
    heads: PredictionHeads


def parts_state(parts: SavedParts) -> dict[str, Any]:
    """Return the state of a learner's parts, and of the global random number generators."""
    return (
        model_state(parts)
        | {
            "optimizer": optimizer_state(parts.optimizer),
            "memory": _memory_state(parts.memory),
            "random": random_state(),
        }
        | history_of(parts.engine)
    )


def restore_history(engine: Engine, state: Mapping[str, Any]) -> None:
    """Restore from :func:`history_of`."""
    if engine.history is not None:
        engine.history.load_state_dict(state.get("engine", {}))


def history_of(engine: Engine) -> dict[str, Any]:
    """Return what a resumed run must know to compute in the same way, if there is anything."""
    history = {} if engine.history is None else engine.history.state_dict()
    return {"engine": history} if history else {}


def model_state(parts: SavedParts) -> dict[str, Any]:
    """Return the state of the parts that make up the model: tasks with their heads, backbone and method."""
    return {
        "tasks": [task_state(task) for task in parts.model.tasks.values()],
        **({"task_sources": sources} if (sources := source_states(parts.model)) else {}),
        "backbone": uncompiled(parts.model.backbone).state_dict(),
        "method": _method_state(parts.method),
        **({} if parts.average is None else average_state(parts.average, parts.model)),
        **({} if parts.heads.are_trained else {"prediction": parts.heads.state_dict()}),
    }


def write_state(
    path: str | os.PathLike[str], state: Mapping[str, Any], sources: Mapping[str, Stateful], writes: bool, keep: int
) -> None:
    """Write a checkpoint, if this rank is the one that writes; all of them gather what is sharded."""
    state = whole(state, keep=writes)
    if writes:
        saved = {name: each.state_dict() for name, each in sources.items()}
        write_checkpoint(path, {**state, "sources": saved}, keep)


def checked_functions(state: Mapping[str, Any], **functions: Any) -> dict[str, Any]:
    """Return the functions of a learner, or raise an error unless exactly those are given that were used."""
    for name, function in functions.items():
        if name in state["learner"] and function is None:
            raise CheckpointError(f"the checkpoint was made with {name}=, which is a function; pass it again")
        if name not in state["learner"] and function is not None:
            raise CheckpointError(f"the checkpoint was made without {name}=; load it without")
    return functions


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
    parts: SavedParts,
    state: Mapping[str, Any],
    *,
    heads: Heads,
    losses: Losses,
    encoders: Encoders,
    sources: Mapping[str, Stateful],
) -> None:
    """Restore the parts of a new learner and the sources saved with it; the backbone changes when all others fit.

    Where the state is that of a model alone, the optimiser is new and the memory empty.
    """
    model = parts.model
    restore_tasks(model, state["tasks"], heads, losses)
    if state["learner"]["feature_dim"] is not None:
        model.build_heads(state["learner"]["feature_dim"])
    restore_heads(model.tasks, state["tasks"])
    restore_sources(model, state, encoders)
    restore_encoders(model, state)
    _restore_groups(parts.optimizer, model.backbone, state["learner"].get("trainable"))
    if state.keys() >= TRAINING:
        restore_optimizer(parts.optimizer, state["optimizer"], model.tasks, model.sources)
        _restore_memory(parts.memory, state["memory"], model.sources)
    else:
        _admit_tasks(parts)
    parts.method.load_state_dict(state["method"]["state"])
    if parts.average is not None:
        restore_average(parts.average, model, state["average"], state.get("average_updates", {}))
    if "prediction" in state:
        parts.heads.load_state_dict(state["prediction"], model, are_current="memory" not in state)
    for name, source in sources.items():
        source.load_state_dict(state["sources"][name])
    backbone = uncompiled(model.backbone)
    backbone.load_state_dict(sharded_like(state["backbone"], backbone.state_dict()))
    restore_history(parts.engine, state)
    if "random" in state:
        set_random_state(state["random"])


def _admit_tasks(parts: SavedParts) -> None:
    """Add the heads of restored tasks to a new optimiser, and start the unfinished ones in an empty memory."""
    for task in parts.model.tasks.values():
        if task.head is not None:
            add_head(parts.optimizer, task)
    for source in parts.model.sources.values():
        if source.encoder is not None:
            add_encoder(parts.optimizer, source)
        if parts.memory is not None and not source.finished:  # a finished one would get a share of the budget
            start_in_memory(parts.memory, source)


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
    encoders: dict[nn.Module, str] = {}
    for source in model.sources.values():
        if source.encoder is not None:
            encoders.setdefault(source.encoder, f"encoder of {source.name}")
    named = {name: encoder for encoder, name in encoders.items()}
    return {"backbone": uncompiled(model.backbone)} | named | heads


def average_state(average: WeightAverage, model: SharedModel) -> dict[str, Any]:
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
def restore_average(
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
        check_is_method(method)
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


def _restore_memory(memory: Memory | None, saved: Mapping[str, Any] | None, sources: Mapping[str, TaskSource]) -> None:
    """Restore the content of a memory."""
    if memory is None:
        return
    if saved is None:
        raise CheckpointError("the checkpoint holds no memory; load it without memory=")
    memory.load_state_dict(saved["state"])
    for name, buffer in memory.buffers.items():
        task = sources[name].task if name in sources else None
        if task is None or (buffer.classes if buffer.labelled else None, buffer.task) != (task.classes, task.name):
            raise CheckpointError(
                f"memory has samples of another source {name!r} than the learner; use another checkpoint"
            )


def check_fits(what: str, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raise an error unless the saved tensors fit a module."""
    check_same(what, module.state_dict(), saved)


def check_same(what: str, mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise an error unless two sets of tensors have the same names, shapes and types."""
    here = {name: describe(tensor) for name, tensor in mine.items()}
    there = {name: describe(tensor) for name, tensor in saved.items()}
    if here != there:
        names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        first = names[0]
        raise CheckpointError(
            f"{what} does not fit the checkpoint in {len(names)} tensors, e.g. {first!r}: "
            f"{here.get(first, 'missing')} here, {there.get(first, 'missing')} in the checkpoint"
        )
