"""Everything that is checked before a call changes a learner."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import is_
from threading import RLock
from typing import Any, Self, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl._util.registry import Named, named_options
from spcl.batches import (
    Batch,
    BatchLike,
    Inputs,
    as_batch,
    as_inputs,
    converted,
    leaves,
    map_leaves,
    number_of_samples,
    sample_kind,
)
from spcl.encoders import ENCODERS
from spcl.engine.model import Samples, SharedModel
from spcl.engine.ranks import World, whole
from spcl.engine.ranks.sharded import is_sharded
from spcl.errors import DataError, SpclError, TaskError
from spcl.learner.parameters import shares_trained
from spcl.losses import CrossEntropy, Loss
from spcl.memory import Memory
from spcl.methods.base import MEMORY, Method
from spcl.tasks import NO_LABEL, Task, TaskDescription, TaskSource, check_labels_of_sources

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
"""By name: importing the second takes longer than importing PyTorch."""

T = TypeVar("T")

ROUNDING = 1e-9
"""Relative tolerance for the same sum computed on different processors."""


# -- arguments of a learner


def check_arguments(backbone: object, method: object, memory: object, *, schedule: object, augment: object) -> None:
    """Raise an error if an argument of a learner cannot be used; its options check themselves."""
    if not isinstance(backbone, nn.Module):
        raise SpclError(f"the backbone must be a torch.nn.Module, but it is {backbone!r:.80}")
    _check_whole(backbone)
    for name, parameter in backbone.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise SpclError(
                f"the backbone's parameter {name!r} has no shape yet; run a batch through the backbone first"
            )
    check_is_method(method)
    if not isinstance(memory, Memory | None):
        raise SpclError(f"the memory must be one such as Reservoir(100), but it is {memory!r:.80}; see spcl.memory")
    if memory is not None and memory.buffers:
        raise SpclError(f"the memory holds samples of {list(memory.buffers)} already; give the learner a new one")
    for name, function, module in (("schedule", schedule, "schedules"), ("augment", augment, "transforms")):
        if function is not None and not callable(function):
            raise SpclError(f"{name} must be a function, but it is {function!r:.80}; see spcl.{module}")


def _check_whole(backbone: nn.Module) -> None:
    """Refuse a backbone that averages gradients over ranks itself."""
    for kind in {parent.__name__ for module in backbone.modules() for parent in type(module).__mro__}:
        if kind in WRAPPERS:
            raise SpclError(f"the backbone is wrapped in {kind}; pass the module that it wraps, and distributed=")


def check_is_method(method: object) -> None:
    """Raise an error unless the method is one, with a name, settings and choices that fit together."""
    if not isinstance(method, Method):
        raise SpclError(
            f"the method must be one such as SORO(), but it is {method!r:.80}; see spcl.methods.make_method"
        )
    method.check_declared()
    if not hasattr(method, "settings"):
        raise SpclError(f"{method!r} has no settings; call super().__init__(**settings) in its __init__")
    if method.elementwise and method.reduction != "none":
        raise SpclError(f"{method!r} overrides combine, which needs reduction 'none', but it is {method.reduction!r}")
    if method.edits_memory and method.reduction == "sum":
        raise SpclError(f"{method!r} edits memory along the tasks' mean gradient, which reduction 'sum' does not keep")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number other than True and False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- tasks


def new_task(
    model: SharedModel,
    name: str,
    classes: int | Sequence[str] | None,
    head: nn.Module | None,
    loss: Loss | None,
) -> Task:
    """Return a task that can be added to the model, or raise an error that says why it cannot."""
    tasks = model.tasks
    _check_name("task", name)
    if name in tasks:
        ended = tasks[name].finished
        advice = f"choose another name, or start it again with add_source({name!r})" if ended else "choose another name"
        raise TaskError(f"there is a task {name!r} already, which {'is finished' if ended else 'is running'}; {advice}")
    if name in model.sources:
        raise TaskError(
            f"there is a source {name!r} already, of task {model.sources[name].task.name!r}; choose another"
        )
    if model.scenario == "domain" and tasks:
        raise TaskError(
            f"task {name!r}: domain-incrementally all sources answer one task, {next(iter(tasks))!r}; add a source of "
            f"it, or choose another scenario"
        )
    if (classes is None) == (head is None) or (head is not None and loss is None):
        raise TaskError(f"task {name!r}: pass either classes=, or head= and loss= together")
    if loss is not None and not callable(loss):
        raise TaskError(f"task {name!r}: its loss must be a function of output and targets, but it is {loss!r:.80}")
    if head is not None and loss is not None:
        _check_head(name, head, model)
        return Task(name, None, loss, head.to(model.device), 0)
    description = TaskDescription.of(name, classes=classes)
    assert description.classes is not None
    weights = loss.class_weights if isinstance(loss, CrossEntropy) else None
    if weights is not None and len(weights) != description.classes:
        raise TaskError(
            f"task {name!r} has {description.classes} classes, but its loss has {len(weights)} class weights"
        )
    offset = sum(task.classes or 0 for task in tasks.values())
    return classifier_task(name, description.classes, offset, loss, description.class_names)


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name or name == MEMORY:
        raise TaskError(f"a {what}'s name must be a non-empty text other than {MEMORY!r}, but it is {name!r}")


def new_sources(
    model: SharedModel, name: str, task: str | Sequence[str] | None, encoder: nn.Module | Named | None
) -> list[TaskSource]:
    """Return a source that can be added to the model, or one that ended and may start again; or raise an error.

    A source whose samples answer several tasks is one for each task.
    """
    _check_name("source", name)
    known = model.answers(name)
    tasks = [task] if isinstance(task, str) else task
    if known and not any(each.finished for each in known):
        if not (known[0].is_implied and known[0].signature is None and task == name):
            raise TaskError(f"there is a source {name!r} already, which is running; choose another name")
    elif known:
        answered = [each.task.name for each in known]
        if tasks is not None and list(tasks) != answered:
            said = repr(answered[0]) if len(answered) == 1 else str(answered)
            raise TaskError(f"source {name!r} answers task {said}, not {task!r}; give it another name")
        if encoder is not None and not _is_same_encoder(encoder, known[0]):
            raise TaskError(f"source {name!r} starts again with the encoder that it had; leave encoder= out")
        return [each for each in known if each.finished]
    elif name in model.tasks and task != name:
        raise TaskError(f"there is a task {name!r} already; give the source another name")
    if tasks is None:
        raise TaskError(f"source {name!r} is new; pass task=, the name of the task that it answers")
    if not tasks or len(set(tasks)) < len(tasks):
        raise TaskError(f"source {name!r}: the tasks that it answers must be different ones, but they are {task!r}")
    found = [find_task(model.tasks, each) for each in tasks]
    names = [name] if isinstance(task, str) else [f"{name}/{each}" for each in tasks]
    if taken := [each for each in names[len(known) :] if each in model.sources]:
        raise TaskError(f"there is a source {taken[0]!r} already; choose another name than {name!r}")
    made = [TaskSource(each, answered, batch=name) for each, answered in zip(names, found, strict=True)]
    return [_checked_encoder(model, each, encoder) for each in made]


def _is_same_encoder(encoder: nn.Module | Named, source: TaskSource) -> bool:
    """Return whether an encoder is the one that a source had, perhaps by name."""
    if isinstance(encoder, nn.Module) or source.encoder_name is None:
        return encoder is source.encoder
    return named_options(encoder, "encoder") == named_options(source.encoder_name, "encoder")


def _checked_encoder(model: SharedModel, source: TaskSource, encoder: object) -> TaskSource:
    """Give a new source its encoder, or raise an error if it cannot have it."""
    if encoder is None:
        return source
    if is_sharded(model.backbone):
        raise TaskError(f"{source.words}: a backbone that is sharded over ranks cannot have encoders in front of it")
    if isinstance(encoder, str | dict):
        ENCODERS.check(encoder)
        source.encoder_name = encoder
        return source
    if not isinstance(encoder, nn.Module):
        raise TaskError(
            f"{source.words}: its encoder must be a torch.nn.Module, or one of {', '.join(ENCODERS)}, but it is "
            f"{encoder!r:.80}"
        )
    if any(nn.parameter.is_lazy(parameter) for parameter in encoder.parameters()):
        raise TaskError(f"{source.words}: its encoder has parameters without a shape; run a batch through it first")
    if shares_trained(encoder, [model.backbone, *model.heads()]):
        raise TaskError(f"{source.words}: its encoder shares parameters with the backbone or a head; copy them")
    source.encoder = encoder.to(model.device)
    return source


def start_in_memory(memory: Memory, source: TaskSource) -> None:
    """Let memory keep samples of a source; the task is named only where its name differs from the source's."""
    task = source.task
    memory.start(source.name, task.classes, *([] if task.name == source.name else [task.name]))


def new_classes(task: Task, classes: int | Sequence[str]) -> tuple[int, tuple[str, ...] | None]:
    """Return the number of classes to add to a task, and their names; or raise an error that says why not."""
    if task.classes is None:
        raise TaskError(f"task {task.name!r} has a head and loss of its own and no classes; start another task")
    if isinstance(task.loss, CrossEntropy) and task.loss.class_weights is not None:
        raise TaskError(f"task {task.name!r} has class weights for {task.classes} classes; leave them out to add more")
    for source in task.sources.values():
        if source.signature is not None and source.signature[1].startswith("float"):
            raise TaskError(
                f"{source.words} learns probabilities over {task.classes} classes, and memory holds some; start "
                f"another task for more classes"
            )
    added = TaskDescription.of(task.name, classes=classes)
    assert added.classes is not None
    if (task.class_names is None) != (added.class_names is None):
        has, give = ("names", "names") if task.class_names else ("no names", "a number")
        raise TaskError(f"the classes of task {task.name!r} have {has}; give {give}, not {classes!r:.80}")
    if again := set(task.class_names or ()) & set(added.class_names or ()):
        raise TaskError(f"task {task.name!r} has the class {min(again)!r} already")
    return added.classes, added.class_names


def classifier_task(
    name: str, classes: int, offset: int, loss: Loss | None = None, class_names: tuple[str, ...] | None = None
) -> Task:
    """Return a classification task, by default with plain cross-entropy; its head is made with its first batch."""
    if loss is None or loss == CrossEntropy():
        loss = cross_entropy
    return Task(name, classes, loss, None, offset, class_names)


def _check_head(task: str, head: object, model: SharedModel) -> None:
    """Raise an error unless the head is a module that shares no trained parameters."""
    if not isinstance(head, nn.Module):
        raise TaskError(f"task {task!r}: its head must be a torch.nn.Module, but it is {head!r:.80}")
    if shares_trained(head, model.modules()):
        raise TaskError(f"task {task!r}: its head shares parameters with the backbone or another head; copy it")


# -- batches


class RankCheck:
    """Refuses, before a step, ranks that have different batches, backbones, methods or new heads.

    If one rank refuses a step, all ranks do.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_done = False
        self._heads: dict[str, nn.Module] = {}
        self._encoders: dict[str, nn.Module] = {}

    def check_batches(self, check: Callable[[], list[Samples]]) -> list[Samples]:
        """Check this rank's batches; return them once every rank has accepted its own.

        Raise an error on all ranks if batches differ in sizes, targets or first inputs.
        """

        def compute() -> tuple[list[Samples], float]:
            samples = check()
            return samples, _batch_checksum(samples)

        samples, checksums = self._world.attempted(compute)
        largest = max(map(abs, checksums))
        for rank, checksum in enumerate(checksums):
            if abs(checksum - checksums[0]) > ROUNDING * largest:
                raise SpclError(
                    f"the ranks have different batches of {', '.join(group.name for group in samples)}: rank "
                    f"{rank} differs from rank 0; give every rank the same batches, which are then split"
                )
        return samples

    def forget(self) -> None:
        """Check again, before the next step, that all ranks have the same backbone."""
        self._is_done = False

    def agreed(self, compute: Callable[[], T]) -> T:
        """Return what this rank computes; an error on one rank is raised on all ranks."""
        return self._world.attempted(lambda: (compute(), 0.0))[0]

    def check(self, model: SharedModel, method: Method) -> None:
        """Raise an error on all ranks unless model and method agree; each module is compared once."""
        if not self._is_done:
            self._world.check_same("backbones", _checksums(model.backbone))
            self._world.check_same("methods or scenarios", f"{method!r} in scenario {model.scenario!r}")
            self._is_done = True
        heads = {task.name: task.head for task in model.tasks.values()}
        encoders = {source.name: source.encoder for source in model.sources.values()}
        for what, modules, known in (("heads", heads, self._heads), ("encoders", encoders, self._encoders)):
            new = {name: each for name, each in modules.items() if each is not None and known.get(name) is not each}
            if new:
                self._world.check_same(what, {name: _checksums(each) for name, each in new.items()})
                known |= new


def _checksums(module: nn.Module) -> dict[str, int]:
    return {name: _checksum(tensor) for name, tensor in module.state_dict().items()}


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(whole(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _batch_checksum(samples: Sequence[Samples]) -> float:
    """Return a checksum of sizes, targets and first inputs; 0 if there are no samples."""
    if not samples:
        return 0.0
    parts = [part for group in samples for part in (group.y, *(leaf[0] for leaf in leaves(group.x).values()))]
    sums = [part.double().sum() for part in parts]
    sizes = torch.tensor([float(len(group.y)) for group in samples], dtype=torch.float64)
    numbers = torch.cat([sizes, torch.stack([each.to(sums[0].device) for each in sums]).cpu()]).nan_to_num()
    return float(numbers @ torch.arange(1.0, len(numbers) + 1, dtype=torch.float64))


class BatchCheck:
    """Checks the batches of a step against the sources, the model, the method and the memory.

    Args:
        model: the shared model.
        method: how gradients become an update.
        memory: of earlier samples, or None.
        ranks: the check of ranks that train together, or None. If one rank refuses a step, all ranks do.
        is_sharded: whether the backbone's parameters are sharded over ranks.
    """

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        memory: Memory | None,
        ranks: RankCheck | None,
        is_sharded: bool = False,
    ) -> None:
        if ranks is not None and method.watches_updates:
            raise SpclError(
                f"{method!r} needs the losses after an update, which several ranks do not compute; train it "
                f"without distributed="
            )
        self._model = model
        self._method = method
        self._memory = memory
        self._ranks = ranks
        self._has_own_check = memory is not None and type(memory).check is not Memory.check
        self._trainable = {parameter: parameter.requires_grad for parameter in model.backbone.parameters()}
        self._parts = BackboneParts(model.backbone, by_name=is_sharded)

    def check(self, batches: Mapping[str, BatchLike]) -> list[Samples]:
        """Return the batches in the order of the sources, or raise an error that names what is wrong.

        Samples without a label are left out, and so is a batch without any.
        """
        if self._ranks is None:
            return self._checked(batches)
        return self._ranks.check_batches(lambda: self._checked(batches))

    def _checked(self, batches: Mapping[str, BatchLike]) -> list[Samples]:
        self._check_trainable()
        sources = self._model.sources
        if not isinstance(batches, dict | Mapping):  # the second alone takes longer
            raise TaskError(f"a step takes a dict of (inputs, targets) by source, but it is a {type(batches).__name__}")
        if not batches:
            running = [name for name, source in sources.items() if not source.finished]
            raise TaskError(f"a step needs a batch of at least one source; active sources: {running}")
        batches = self._by_task(batches)
        dtype = self._model.dtype
        samples = [samples_of(source, batches[name], dtype) for name, source in sources.items() if name in batches]
        for group in samples:
            group.source.check_batch(group.x, group.y)
        samples = _with_common_inputs(samples)
        if any(group.task.classes is None and _has_unlabelled(group.y) for group in samples):
            samples = [group for group in map(_labelled, samples) if len(group.y)]
        try:
            check_labels_of_sources([(group.source, group.y) for group in samples])
        except TaskError:
            samples = [group for group in map(_labelled, samples) if len(group.y)]
            check_labels_of_sources([(group.source, group.y) for group in samples])
        if self._memory is not None and self._has_own_check:  # a policy may refuse samples that fit their source
            for group in samples:
                self._memory.check(group.name, group.x, group.y)
        return samples

    def _by_task(self, batches: Mapping[str, BatchLike]) -> Mapping[str, BatchLike]:
        """Return batches with one target each: of a batch that answers several tasks, one for each task."""
        model, found = self._model, dict[str, BatchLike]()
        for name, batch in batches.items():
            if name in model.sources:
                found[name] = batch
                continue
            parts = {source.task.name: source for source in find_sources(model, name)}
            if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Mapping):
                raise TaskError(f"source {name!r} answers {list(parts)}; give targets as a dict by task")
            for task in batch[1]:
                if task not in parts:
                    raise TaskError(f"source {name!r} does not answer task {task!r}; its tasks are {list(parts)}")
            if not batch[1]:
                raise TaskError(f"source {name!r}: the batch has no targets; leave it out instead")
            try:
                x = as_inputs(batch[0])
            except DataError as error:
                raise TaskError(f"source {name!r}: {error}") from None
            found |= {parts[task].name: (x, y) for task, y in batch[1].items()}
        return found

    def features_of(self, new: Sequence[Samples]) -> int | None:
        """Run the first samples of sources through the model; return the number of features, once it is known."""
        return self._features(new) if self._ranks is None else self._ranks.agreed(lambda: self._features(new))

    def errors(self, batches: Mapping[str, BatchLike]) -> dict[str, TaskError]:
        """Check each batch alone; return the errors by source, without exchanging anything between ranks."""
        refused = {}
        for name, batch in batches.items():
            try:
                new = [group for group in self._checked({name: batch}) if group.source.signature is None]
                with self.encoders_for(new):
                    self._features(new)
            except TaskError as error:
                refused[name] = error
        return refused

    def _features(self, new: Sequence[Samples]) -> int | None:
        feature_dim = self._model.feature_dim
        for group in new:
            self._method.check_task(group.task, group.x, self._memory)
            features = self._model.probe(group)
            if feature_dim is not None and features not in (None, feature_dim):
                raise TaskError(
                    f"{group.source.words}: the backbone gives {features} features for it and {feature_dim} "
                    f"for the sources before"
                )
            feature_dim = feature_dim or features
        return feature_dim

    @contextmanager
    def encoders_for(self, new: Sequence[Samples]) -> Iterator[list[TaskSource]]:
        """Make encoders that sources have by name, for their first samples; undo it if the block raises."""
        made = self._model.build_encoders(new)
        try:
            yield made
        except BaseException:
            for source in made:
                source.encoder = None
            self._model.follow_encoders()
            raise

    def removed_parameters(self) -> set[nn.Parameter] | None:
        """Return the parameters that were removed from the backbone; None if its parts have not changed."""
        if not self._parts.have_changed():
            return None
        return set(self._trainable).difference(self._model.backbone.parameters())

    def _check_trainable(self) -> None:
        """Raise if parameters were added, frozen or unfrozen without the learner: the gradient matrix would not fit."""
        if self._ranks is not None and self._parts.have_changed():
            raise SpclError(
                "parameters or modules of the backbone were added, removed or replaced after the learner was made; "
                "call the learner's unfreeze with the names of the new parameters on every rank, or, if the backbone "
                "is sharded, make a new learner"
            )
        if [parameter.requires_grad for parameter in self._trainable] == [*self._trainable.values()]:
            return
        for name, parameter in self._model.backbone.named_parameters():
            if parameter.requires_grad != self._trainable.get(parameter, parameter.requires_grad):
                done = "unfrozen" if parameter.requires_grad else "frozen"
                raise SpclError(
                    f"the backbone's parameter {name!r} was {done} after the learner was made; "
                    f"set it back, and call the learner's {done.removesuffix('frozen')}freeze({name!r}) instead"
                )


class BackboneParts:
    """Remembers a backbone's modules and parameters, to notice changes.

    Reading the dicts that hold them takes microseconds, walking over the modules ten times as long.
    """

    def __init__(self, backbone: nn.Module, by_name: bool) -> None:
        self._owners = [owned for part in backbone.modules() for owned in (part._parameters, part._modules)]
        self._entries: Callable[[Any], Iterable[object]] = dict.keys if by_name else dict.values
        self._known = [*self._present()]

    def have_changed(self) -> bool:
        """Return whether any module or parameter was added, removed or replaced."""
        present = [*self._present()]
        return len(present) != len(self._known) or not all(map(is_, present, self._known))

    def _present(self) -> Iterable[object]:
        return chain.from_iterable(map(self._entries, self._owners))


def samples_of(source: TaskSource, batch: BatchLike, dtype: torch.dtype) -> Samples:
    """Return a batch as samples of the source, or raise an error that names it.

    Floating-point numbers are converted to the type of the source's samples, of a new one to ``dtype``, the model's.

    Tensors that require gradients are detached: a step must not write the ``.grad`` of the caller's tensors.
    """
    try:
        x, y = as_batch(batch)
    except DataError as error:
        raise TaskError(f"{source.words}: {error}") from None
    x_kind, y_kind = source.signature or (None, None)
    x, fitting_y = converted(x, x_kind, dtype), converted(y, y_kind, dtype)
    assert isinstance(fitting_y, Tensor)
    return Samples(source, _detached(x) if isinstance(x, Tensor) else map_leaves(_detached, x), _detached(fitting_y))


def _with_common_inputs(samples: Sequence[Samples]) -> list[Samples]:
    """Return samples that came in one batch with the same inputs, not with copies of them."""
    first: dict[str, Samples] = {}
    found = []
    for group in samples:
        other = first.setdefault(group.source.batch, group)
        is_same = other is not group and sample_kind(other.x) == sample_kind(group.x)
        found.append(replace(group, x=other.x) if is_same else group)
    return found


def labelled(x: Inputs, y: Tensor) -> Batch:
    """Return the samples that have a label: another one than −100, or numbers that are not all NaN.

    >>> labelled(torch.tensor([[1.0], [2.0]]), torch.tensor([-100, 0]))
    (tensor([[2.]]), tensor([0]))
    >>> labelled(torch.tensor([[1.0], [2.0]]), torch.tensor([[torch.nan], [0.5]]))
    (tensor([[2.]]), tensor([[0.5000]]))
    """
    if y.ndim == 0 or len(y) != number_of_samples(x):
        return x, y  # the checks say what is wrong
    if y.is_floating_point():
        has_label = ~y.isnan().flatten(1).all(dim=1) if y.ndim > 1 else ~y.isnan()
    elif y.ndim == 1 and y.dtype == torch.int64:
        has_label = y != NO_LABEL
    else:
        return x, y
    return map_leaves(lambda leaf: leaf[has_label.to(leaf.device)], x), y[has_label]


def _labelled(group: Samples) -> Samples:
    x, y = labelled(group.x, group.y)
    return replace(group, x=x, y=y)


def _has_unlabelled(y: Tensor) -> bool:
    """Return whether some samples may have no numbers as targets; that costs a sum."""
    return y.is_floating_point() and bool(y.sum().isnan())


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def find_task(tasks: Mapping[str, Task], name: str) -> Task:
    """Return the task of this name, or raise an error that lists the tasks."""
    if name not in tasks:
        raise TaskError(f"there is no task {name!r}; there are {list(tasks)}; start it with add_task")
    return tasks[name]


def find_sources(model: SharedModel, name: str) -> list[TaskSource]:
    """Return the source of this name, one for each task that it answers, or raise an error that lists the sources."""
    if found := model.answers(name):
        return found
    if name in model.tasks:
        raise TaskError(f"task {name!r} has sources of its own, {list(model.tasks[name].sources)}; name one of them")
    raise TaskError(
        f"there is no source {name!r}; there are {list(model.sources)}; start it with add_task, or with add_source and "
        f"the task that it answers"
    )


# -- calls


class OneCallAtATime:
    """Refuses a call while another call of the same learner is running.

    While a thread is in a call, other threads are refused. Within a call that changes the learner, such as a step, the
    same thread may predict, e.g. in a loss, but not begin another change.

    >>> calls = OneCallAtATime()
    >>> with calls.changing("step"):
    ...     with calls.reading("predict"):
    ...         calls.changing("save").__enter__()
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: save was called within a call of step; call it when step has returned
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._change: str | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copy of a learner is called independently

    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Return the context of a call that changes the learner, or reads what a step changes."""
        with self.reading(name):
            if self._change is not None:
                raise SpclError(
                    f"{name} was called within a call of {self._change}; call it when {self._change} has returned"
                )
            self._change = name
            try:
                yield
            finally:
                self._change = None

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Return the context of a call that predicts."""
        if not self._lock.acquire(blocking=False):
            raise SpclError(
                f"{name} was called while another thread is in a call of the same learner; make the calls of a "
                f"learner one after the other, e.g. in one thread, and predict in other threads by learner.snapshot()"
            )
        try:
            yield
        finally:
            self._lock.release()
