"""Admission of batches: everything that is checked before a step changes anything."""

from collections.abc import Mapping, Sequence

from torch import nn

from spcl.batches import BatchLike, as_batch
from spcl.engine.model import Samples, SharedModel
from spcl.errors import DataError, SpclError, TaskError
from spcl.learner.distribution import RankCheck
from spcl.learner.modules import shares_trained
from spcl.losses import CrossEntropy, Loss
from spcl.memory import Memory
from spcl.methods.base import MEMORY, Method
from spcl.methods.tasks import Task, check_all_labels, describe_samples

__all__ = ["Admission", "check_arguments", "check_method", "check_new_task", "find_task", "samples_of"]

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
"""By name, since importing the second one takes longer than importing PyTorch."""


class Admission:
    """Checks the batches of a step against the tasks, the model, the method and the memory.

    Args:
        model: the shared model.
        method: how gradients become an update.
        memory: of earlier samples, or None.
        ranks: those that train together, of which all refuse what one refuses, or None.
    """

    def __init__(self, model: SharedModel, method: Method, memory: Memory | None, ranks: RankCheck | None) -> None:
        self._model = model
        self._method = method
        self._memory = memory
        self._ranks = ranks
        self._has_own_check = memory is not None and type(memory).check is not Memory.check
        self._trainable = {parameter: parameter.requires_grad for parameter in model.backbone.parameters()}

    def check(self, batches: Mapping[str, BatchLike]) -> list[Samples]:
        """Return the batches in the order of the tasks, or raise an error that names what is wrong."""
        return self._checked(batches) if self._ranks is None else self._ranks.admitted(lambda: self._checked(batches))

    def _checked(self, batches: Mapping[str, BatchLike]) -> list[Samples]:
        self._check_trainable()
        tasks = self._model.tasks
        if not isinstance(batches, dict | Mapping):  # the second alone takes longer
            raise TaskError(f"a step takes a dict of (inputs, targets) by task, but it is a {type(batches).__name__}")
        if not batches:
            running = [name for name, task in tasks.items() if not task.finished]
            raise TaskError(f"a step needs a batch of at least one task; active tasks: {running}")
        for name in batches:
            find_task(tasks, name)
        samples = [samples_of(task, batches[name]) for name, task in tasks.items() if name in batches]
        for group in samples:
            group.task.check_batch(group.x, group.y)
        check_all_labels((group.task, group.y) for group in samples)
        if self._memory is not None:
            for group in samples:
                # labels have been looked at, but a policy may refuse other samples
                check = self._memory.check if self._has_own_check else self._memory.check_kind
                check(group.task.name, group.x, group.y)
        return samples

    def try_first_samples(self, new: Sequence[Samples]) -> int | None:
        """Run the first samples of tasks through the model; return the number of features, once it is known.

        If all of them fit, their shapes and types become the tasks' signatures.
        """
        if not new:
            return self._model.feature_dim
        feature_dim = self._features(new) if self._ranks is None else self._ranks.agreed(lambda: self._features(new))
        for group in new:
            group.task.signature = describe_samples(group.x, group.y)
        return feature_dim

    def errors(self, batches: Mapping[str, BatchLike]) -> dict[str, TaskError]:
        """Return why batches are refused, each checked alone, by task; ranks find the same without a word."""
        refused = {}
        for name, batch in batches.items():
            try:
                self._features([group for group in self._checked({name: batch}) if group.task.signature is None])
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
                    f"task {group.task.name!r}: the backbone gives {features} features for it and {feature_dim} "
                    f"for the tasks before"
                )
            feature_dim = feature_dim or features
        return feature_dim

    def _check_trainable(self) -> None:
        """Refuse a backbone with parameters frozen or unfrozen since: the gradient matrix would not fit it."""
        if [parameter.requires_grad for parameter in self._trainable] == [*self._trainable.values()]:
            return
        for name, parameter in self._model.backbone.named_parameters():
            if parameter.requires_grad != self._trainable.get(parameter, parameter.requires_grad):
                done = "unfrozen" if parameter.requires_grad else "frozen"
                raise SpclError(
                    f"the backbone's parameter {name!r} was {done} after the learner was made; "
                    f"set it back, and call the learner's {done.removesuffix('frozen')}freeze({name!r}) instead"
                )


def samples_of(task: Task, batch: BatchLike) -> Samples:
    """Return a batch as samples of the task, or raise an error that names the task."""
    try:
        return Samples(task, *as_batch(batch))
    except DataError as error:
        raise TaskError(f"task {task.name!r}: {error}") from None


def find_task(tasks: Mapping[str, Task], name: str) -> Task:
    """Return the task of this name, or raise an error that lists the tasks."""
    if name not in tasks:
        raise TaskError(f"there is no task {name!r}; there are {list(tasks)}; start it with add_task")
    return tasks[name]


def check_arguments(backbone: object, method: object, memory: object, memory_batch: int | None) -> None:
    """Validate the constructor arguments of a learner."""
    if not isinstance(backbone, nn.Module):
        raise SpclError(f"the backbone must be a torch.nn.Module, but it is {backbone!r:.80}")
    _check_whole(backbone)
    for name, parameter in backbone.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise SpclError(
                f"the backbone's parameter {name!r} has no shape yet; run a batch through the backbone first"
            )
    check_method(method)
    if not isinstance(memory, Memory | None):
        raise SpclError(f"the memory must be one such as Reservoir(100), but it is {memory!r:.80}; see spcl.memory")
    if memory_batch is not None and (not isinstance(memory_batch, int) or memory_batch < 1):
        raise SpclError(f"memory_batch is {memory_batch!r}; give a positive whole number, or None")
    if memory is not None and memory.buffers:
        raise SpclError(f"the memory holds samples of {list(memory.buffers)} already; give the learner a new one")


def _check_whole(backbone: nn.Module) -> None:
    """Refuse a backbone that averages gradients over ranks itself."""
    for kind in {parent.__name__ for module in backbone.modules() for parent in type(module).__mro__}:
        if kind in WRAPPERS:
            raise SpclError(f"the backbone is wrapped in {kind}; pass the module that it wraps, and distributed=")


def check_method(method: object) -> None:
    """Refuse what is no method, or one without name or settings."""
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


def check_new_task(model: SharedModel, name: str, classes: object, head: nn.Module | None, loss: Loss | None) -> None:
    """Refuse a task that cannot be added to a model."""
    tasks = model.tasks
    if not isinstance(name, str) or not name or name == MEMORY:
        raise TaskError(f"a task's name must be a non-empty text other than {MEMORY!r}, but it is {name!r}")
    if name in tasks:
        state = "is finished" if tasks[name].finished else "is running"
        raise TaskError(f"there is a task {name!r} already, which {state}; choose another name")
    if (classes is None) == (head is None) or (head is not None and loss is None):
        raise TaskError(f"task {name!r}: pass either classes=, or head= and loss= together")
    if loss is not None and not callable(loss):
        raise TaskError(f"task {name!r}: its loss must be a function of output and targets, but it is {loss!r:.80}")
    if head is not None:
        _check_head(name, head, model)
    if classes is not None:
        count = _check_classes(name, classes)
        weights = loss.class_weights if isinstance(loss, CrossEntropy) else None
        if weights is not None and len(weights) != count:
            raise TaskError(f"task {name!r} has {count} classes, but its loss has {len(weights)} class weights")


def _check_head(task: str, head: object, model: SharedModel) -> None:
    """Refuse what is no module, or has parameters that the backbone or another head trains."""
    if not isinstance(head, nn.Module):
        raise TaskError(f"task {task!r}: its head must be a torch.nn.Module, but it is {head!r:.80}")
    if shares_trained(head, model.modules()):
        raise TaskError(f"task {task!r}: its head shares parameters with the backbone or another head; copy it")


def _check_classes(task: str, classes: object) -> int:
    """Return the number of classes, given as that number or as their names."""
    if isinstance(classes, int) and classes >= 1:
        return classes
    if not isinstance(classes, tuple | list) or not classes:
        raise TaskError(f"task {task!r}: classes must be a positive whole number, or names, but it is {classes!r:.80}")
    if not all(isinstance(each, str) and each for each in classes) or len(set(classes)) < len(classes):
        raise TaskError(f"task {task!r}: the names of classes must be different texts, but they are {classes!r:.80}")
    return len(classes)
