"""The online learner: one model, tasks that come and go, one step at a time (the paper's Algorithm 2)."""

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.cuda_graphs.backbone import CapturedBackbone
from spcl.cuda_graphs.columns import CapturedColumns
from spcl.cuda_graphs.gramian import CapturedGramian
from spcl.cuda_graphs.graphs import Graphs, Recurring
from spcl.cuda_graphs.penalty import CapturedPenalty
from spcl.cuda_graphs.step import CapturedStep
from spcl.cuda_graphs.update import CapturedUpdate
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples, Scenario, SharedModel
from spcl.errors import SpclError, TaskError
from spcl.learner import state as states
from spcl.learner.columns import Collected, Collector, nothing
from spcl.learner.report import StepReport
from spcl.learner.rollback import StepGuard
from spcl.memory import Memory
from spcl.methods.base import MEMORY, Loss, Method, Task, classifier_task, describe_samples
from spcl.stability import Stability

__all__ = ["Batch", "Learner"]

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

WARN_AFTER = 3
PREDICT_BATCH = 1024


class Learner:
    """Trains one shared backbone, with a head per task, on any number of sources at once.

    Args:
        backbone: any module that turns a batch of inputs into features; where it lives is where training happens.
        method: how the tasks' gradients become one update, e.g. ``spcl.methods.SORO()``.
        optimizer: makes the optimiser from a list of parameters; by default Adam with learning rate 1e-3.
        memory: where samples of earlier tasks are kept for rehearsal; None rehearses nothing.
        scenario: ``"task"``: a sample's task is known when predicting, and its loss covers that task's classes;
            ``"class"``: it is not, and the loss covers the classes of every task added so far.
        memory_batch: how many samples to rehearse in a step; by default as many as the step's largest batch has.
        autocast: ``torch.bfloat16`` for mixed precision.
        measure_stability: report κ, conflicts and magnitude similarity also for methods that need no Gramian, which
            costs them a row of memory per task.
        capture: on a GPU, capture a batch's work as a CUDA graph and replay it; what cannot be captured is run eagerly.
        seed: decides how new heads are initialised.

    >>> from spcl.methods import SORO
    >>> _ = torch.manual_seed(0)
    >>> learner = Learner(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), SORO())
    >>> learner.add_task("camera", classes=3)
    >>> learner.add_task("speed", head=nn.Linear(8, 1), loss=nn.functional.mse_loss)
    >>> x = torch.randn(16, 4)
    >>> report = learner.step({"camera": (x, torch.arange(16) % 3), "speed": (x, x[:, :1])})
    >>> sorted(report.losses), report.after.condition_number < report.before.condition_number
    (['camera', 'speed'], True)
    >>> learner.finish_task("camera")
    >>> learner.predict(x, task="camera").shape
    torch.Size([16])
    """

    def __init__(
        self,
        backbone: nn.Module,
        method: Method,
        *,
        optimizer: MakeOptimizer | None = None,
        memory: Memory | None = None,
        scenario: Scenario = "task",
        memory_batch: int | None = None,
        autocast: torch.dtype | None = None,
        measure_stability: bool = False,
        capture: bool = True,
        seed: int = 0,
    ) -> None:
        _check_types(backbone, method, memory)
        if memory_batch is not None and memory_batch < 1:
            raise SpclError(f"memory_batch must be positive, but it is {memory_batch}")
        if memory is not None and memory.buffers:
            raise SpclError(f"the memory holds samples of {list(memory.buffers)} already; give the learner a new one")
        self.model = SharedModel(backbone, scenario, method.make_head, seed, autocast, method.joint_logits)
        self._trainable = {parameter: parameter.requires_grad for parameter in backbone.parameters()}
        shared = [parameter for parameter, trainable in self._trainable.items() if trainable]
        self.method = method
        self.memory = memory
        self.memory_batch = memory_batch
        self.measure_stability = measure_stability
        self.capture = capture
        self.seed = seed
        self.steps = 0
        self.optimizer = _made(optimizer or torch.optim.Adam, shared)
        self._head_group()  # now: a schedule must know it before there is a head
        self._guard = StepGuard(self.model, method, memory)
        rows = GradientMatrix(shared)
        self._collector = Collector(self.model, method, memory, rows, self._guard)
        self._graphs = Graphs(self.model)
        self._update: Callable[[Optimizer], object] = lambda optimizer: optimizer.step()
        if capture and self.model.device.type == "cuda":
            self._guard.copying = Recurring(self._graphs)
            self._update = CapturedUpdate(self._graphs)
            self._collector.measure = CapturedGramian(self._graphs)
            captured = CapturedColumns(self.model, rows, self._graphs, method.stores_logits)
            self._collector.captured = captured
            self._collector.captured_step = CapturedStep(captured, self.model, rows, self._graphs)
            self._collector.backbone = CapturedBackbone(self.model, rows, self._graphs)
            if method.settings.alpha:
                self._collector.penalty = CapturedPenalty(self.model, rows, self._graphs, method.settings.alpha)

    # -- tasks

    @property
    def scenario(self) -> Scenario:
        """Task-incremental or class-incremental."""
        return self.model.scenario

    @property
    def tasks(self) -> dict[str, Task]:
        """All tasks ever added, in that order."""
        return self.model.tasks

    @property
    def active_tasks(self) -> list[str]:
        """The tasks that are not finished."""
        return [name for name, task in self.tasks.items() if not task.finished]

    @property
    def classes(self) -> list[tuple[str, int]]:
        """(task, label) of every class seen, in the order of class-incremental predictions."""
        return [(task.name, label) for task in self.model.classifiers for label in range(task.classes or 0)]

    def add_task(
        self, name: str, *, classes: int | None = None, head: nn.Module | None = None, loss: Loss | None = None
    ) -> None:
        """Start a task: a classifier of so many classes, or a head and a loss of its own.

        Args:
            name: its name.
            classes: how many classes it has; their labels are 0, 1, ….
            head: a module on the backbone's features, for anything else: regression, dense or multi-label prediction.
            loss: (output of the head, targets) → scalar; needed with ``head``.
        """
        if not isinstance(name, str) or not name or name == MEMORY:
            raise TaskError(f"a task's name must be a non-empty text other than {MEMORY!r}, but it is {name!r}")
        if name in self.tasks:
            state = "is finished" if self.tasks[name].finished else "is running"
            raise TaskError(f"there is a task {name!r} already, which {state}; choose another name")
        if (classes is None) == (head is None) or (head is None) != (loss is None):
            raise TaskError(f"task {name!r}: pass either classes=, or head= and loss= together")
        if classes is not None:
            if not isinstance(classes, int) or classes < 1:
                raise TaskError(f"task {name!r}: classes must be a positive whole number, but it is {classes!r}")
            task = classifier_task(name, classes, len(self.classes))
        else:
            self._check_is_new(name, cast(nn.Module, head))
            task = Task(name, None, cast(Loss, loss), cast(nn.Module, head).to(self.model.device), 0)
        if self.memory is not None:
            self.memory.start(name, classes)
        self.tasks[name] = task
        if head is not None:
            self._optimise(task)
        if self.model.feature_dim is not None:
            self._build_heads(self.model.feature_dim)

    def _check_is_new(self, name: str, head: nn.Module) -> None:
        known = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        if known.intersection(head.parameters()):
            raise TaskError(f"task {name!r}: its head shares parameters with the backbone or another head; copy it")

    def finish_task(self, name: str) -> None:
        """End a task: it is not trained any more but by rehearsal, and its samples go to memory as the policy says."""
        task = self._task(name)
        if task.finished:
            raise TaskError(f"task {name!r} is finished already")
        if self.memory is not None:
            self.memory.finish(name, (lambda x: self._logits(x, task)) if self.method.stores_logits else None)
        task.finished = True

    # -- training

    def step(self, batches: Mapping[str, Batch], meanwhile: Callable[[], object] = nothing) -> StepReport:
        """One update from a batch of each of the given tasks, and from memory once it holds something.

        A task whose loss or gradient is not finite is left out, reported, and named in a warning after three in a row:
        the step is repeated without it, and the others train as if it had not been there. After a call that raises,
        unless it is the optimiser that was interrupted, training goes on as if it had not been made.

        Args:
            batches: (inputs, targets) of any of the running tasks; their sizes may differ.
            meanwhile: called once a GPU has its work, before it is waited for: a good time to fetch the next batches.
        """
        samples = self._checked(batches)
        capturing = self._graphs.seconds
        self._train_mode()
        self._guard.remember()
        try:
            collected, dropped = self._collect(samples, meanwhile)
            begin = perf_counter()
            if collected.losses:
                self._update(self.optimizer)
        except BaseException:
            self._undo()
            raise
        self._learn_from([group for group in samples if group.task.name not in dropped], collected)
        self.steps += 1
        collected.seconds["update"] = perf_counter() - begin
        if self._graphs.seconds > capturing:
            collected.seconds["capture"] = self._graphs.seconds - capturing
        self._count_left_out(samples, dropped)
        return self._report(collected, dropped)

    def _undo(self, draws: bool = True) -> None:
        self._guard.restore(draws)
        self.optimizer.zero_grad(set_to_none=True)

    def _collect(self, samples: list[Samples], meanwhile: Callable[[], object]) -> tuple[Collected, dict[str, str]]:
        """The update from all columns that are finite, and why the others are left out.

        A step with columns at fault is undone and repeated without them, so that they leave no trace; where no task is
        left nothing is done. Where memory is at fault other samples are drawn next time.
        """
        dropped: dict[str, str] = {}
        seconds: dict[str, float] = {}
        while samples:
            rehearse = 0 if MEMORY in dropped else self._rehearsal_size(samples)
            for parameter in self.model.head_parameters():
                parameter.grad = None  # the shared parameters get their update as a whole, heads only where trained
            collected = Collected(seconds=seconds)
            self._collector.collect(collected, samples, rehearse, self.measure_stability, meanwhile)
            if not collected.faults:
                return collected, dropped
            dropped |= collected.faults
            meanwhile = nothing  # it has been called
            self._undo(draws=MEMORY not in dropped)
            samples = [group for group in samples if group.task.name not in dropped]
        return Collected(seconds=seconds), dropped

    def _rehearsal_size(self, samples: list[Samples]) -> int:
        if self.memory is None or not len(self.memory):
            return 0
        return self.memory_batch or max(len(group.x) for group in samples)

    def _checked(self, batches: Mapping[str, Batch]) -> list[Samples]:
        """The batches in the order of the tasks, all of them checked before anything changes."""
        self._check_trainable()
        if not batches:
            raise TaskError(f"a step needs a batch of at least one task; running are {self.active_tasks}")
        for name, batch in batches.items():
            self._task(name)
            if not (isinstance(batch, tuple | list) and [isinstance(part, Tensor) for part in batch] == [True, True]):
                raise TaskError(
                    f"task {name!r}: a batch is a pair of tensors (inputs, targets), but it is {batch!r:.80}"
                )
        samples = [Samples(task, *batches[name]) for name, task in self.tasks.items() if name in batches]
        for group in samples:
            group.task.check_batch(group.x, group.y)
            if self.memory is not None:
                self.memory.check(group.task.name, group.x, group.y)
        self._admit([group for group in samples if group.task.signature is None])
        return samples

    def _check_trainable(self) -> None:
        """Refuse a backbone that was frozen or unfrozen: rows and optimiser hold what was trainable at first."""
        if all(parameter.requires_grad == trainable for parameter, trainable in self._trainable.items()):
            return
        for name, parameter in self.model.backbone.named_parameters():
            if parameter.requires_grad != self._trainable.get(parameter, parameter.requires_grad):
                done = "unfrozen" if parameter.requires_grad else "frozen"
                raise SpclError(
                    f"the backbone's parameter {name!r} was {done} after the learner was made; "
                    f"set it back, or make a new learner of the backbone"
                )

    def _admit(self, new: list[Samples]) -> None:
        """Try the first samples of tasks; if they all fit, note what they are like and make the missing heads."""
        kinds, feature_dim = self._known_kinds(), self.model.feature_dim
        for group in new:
            self._check_fits_memory(group, kinds)
            self.method.check_task(group.task, group.x, self.memory)
            features = self.model.probe(group)
            if feature_dim is not None and features not in (None, feature_dim):
                raise TaskError(
                    f"task {group.task.name!r}: the backbone gives {features} features for it and {feature_dim} "
                    f"for the tasks before"
                )
            feature_dim = feature_dim or features
            kinds.setdefault(describe_samples(group.x, group.y)[0], group.task.name)
        for group in new:
            group.task.signature = describe_samples(group.x, group.y)
        if feature_dim is not None:
            self._build_heads(feature_dim)

    def _known_kinds(self) -> dict[str, str]:
        """The shapes and types of samples seen so far, each with the first task that has them."""
        kinds: dict[str, str] = {}
        for task in self.tasks.values():
            if task.signature is not None:
                kinds.setdefault(task.signature[0], task.name)
        return kinds

    def _check_fits_memory(self, group: Samples, kinds: Mapping[str, str]) -> None:
        """Samples of all tasks are rehearsed in one batch, so they must be of one shape and type."""
        kind = describe_samples(group.x, group.y)[0]
        if self.memory is not None and kinds and kind not in kinds:
            other, owner = next(iter(kinds.items()))
            raise TaskError(
                f"task {group.task.name!r} has samples of {kind}, but memory holds {other} of task {owner!r}; "
                f"bring them to one shape and type, or train without memory"
            )

    def _learn_from(self, samples: list[Samples], collected: Collected) -> None:
        """Tell method and memory of the samples that took part."""
        if not samples:
            return
        self.method.after_step(collected.losses)
        if self.memory is None:
            return
        for rehearsal, x in collected.edits:
            self.memory.replace(rehearsal, x)
        for group in samples:
            self.memory.observe(group.task.name, group.x, group.y, collected.logits.get(group.task.name))

    def _count_left_out(self, samples: list[Samples], dropped: Mapping[str, str]) -> None:
        if MEMORY in dropped:
            warnings.warn(f"memory was left out of a step: {dropped[MEMORY]}", RuntimeWarning, stacklevel=3)
        for task in (group.task for group in samples):
            if task.name not in dropped:
                task.skipped_in_a_row = 0
                continue
            task.skipped += 1
            task.skipped_in_a_row += 1
            if task.skipped_in_a_row == WARN_AFTER:
                warnings.warn(
                    f"task {task.name!r} was left out of {WARN_AFTER} steps in a row: {dropped[task.name]}; "
                    f"check its data and the learning rate",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def _report(self, collected: Collected, dropped: dict[str, str]) -> StepReport:
        return StepReport(
            step=self.steps - 1,
            losses=collected.losses,
            weights=collected.weights,
            before=None if collected.before is None else Stability(collected.before),
            after=None if collected.after is None else Stability(collected.after),
            skipped=dropped,
            seconds=collected.seconds,
            memory_bytes=0 if self.memory is None else self.memory.nbytes,
        )

    # -- prediction

    def predict(self, x: Tensor, task: str | None = None) -> Tensor:
        """Labels for inputs, on the CPU or wherever the model lives.

        With ``task``, that task's labels (or what its own head gives). Without, class-incremental: indices into
        :attr:`classes`, over all classes seen.
        """
        if task is not None and self._task(task).classes is None:
            return self.logits(x, task)
        return self.logits(x, task).argmax(dim=1)

    def logits(self, x: Tensor, task: str | None = None) -> Tensor:
        """The scores behind :meth:`predict`."""
        if task is None and self.scenario == "task":
            raise TaskError("a task-incremental learner must be told the task: predict(x, task=…)")
        if task is None and not self.model.classifiers:
            raise TaskError("there is no classification task yet; call add_task first")
        chosen = None if task is None else self._task(task)
        if not isinstance(x, Tensor):
            raise TaskError(f"predictions are made for a tensor, but x is {type(x).__name__}; try torch.as_tensor(x)")
        if x.ndim == 0 or len(x) == 0:
            raise TaskError(f"there is nothing to predict: x has shape {tuple(x.shape)}")
        with self.model.naming(chosen, x), torch.no_grad(), self.model.evaluating():
            return torch.cat([self.model.logits(part, chosen) for part in x.split(PREDICT_BATCH)])  # type: ignore[no-untyped-call]

    def _logits(self, x: Tensor, task: Task) -> Tensor:
        joint = self.scenario == "class" and task.classes is not None
        return self.logits(x, None if joint else task.name)

    # -- checkpoints

    def save(self, path: str | os.PathLike[str], **sources: states.Stateful) -> None:
        """Write a checkpoint, from which :meth:`load` continues exactly.

        One safetensors file, without pickle, checksummed, replaced atomically; the previous one stays beside it.

        Args:
            path: the file.
            sources: streams, schedules and whatever else has ``state_dict()``, to be saved under that name.
        """
        _check_names(sources)
        write_checkpoint(
            path, states.learner_state(self) | {"sources": {k: v.state_dict() for k, v in sources.items()}}
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        backbone: nn.Module,
        method: Method | None = None,
        optimizer: MakeOptimizer | None = None,
        memory: Memory | None = None,
        heads: Mapping[str, tuple[nn.Module, Loss]] | None = None,
        **sources: states.Stateful,
    ) -> Self:
        """The learner as it was saved; random number generators are set back as well.

        Args:
            path: the file.
            backbone: a module of the same architecture; it gets the saved weights.
            method: needed only if it is not one of ``spcl.methods``.
            optimizer: needed only if it is not one of ``torch.optim``.
            memory: needed only if it is not one of ``spcl.memory``.
            heads: head and loss of every task that was added with its own, by name.
            sources: what was saved along, each to be set back by its ``load_state_dict``. A schedule needs the loaded
                learner's optimiser: make it afterwards and hand it ``read_checkpoint(path)["sources"][name]``.
        """
        saved = read_checkpoint(path)
        return cls.from_state(
            saved, backbone=backbone, method=method, optimizer=optimizer, memory=memory, heads=heads, **sources
        )

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        *,
        backbone: nn.Module,
        method: Method | None = None,
        optimizer: MakeOptimizer | None = None,
        memory: Memory | None = None,
        heads: Mapping[str, tuple[nn.Module, Loss]] | None = None,
        **sources: states.Stateful,
    ) -> Self:
        """Restore the learner from a checkpoint that has been read; the arguments are those of :meth:`load`."""
        return states.restored(cls, state, backbone, method, optimizer, memory, heads or {}, sources)

    # -- small help

    def _task(self, name: str) -> Task:
        if name not in self.tasks:
            raise TaskError(f"there is no task {name!r}; there are {list(self.tasks)}; start it with add_task")
        return self.tasks[name]

    def _train_mode(self) -> None:
        if not self.model.backbone.training:
            self.model.backbone.train()

    def _build_heads(self, feature_dim: int) -> None:
        for task in self.model.build_heads(feature_dim):
            self._optimise(task)

    def _optimise(self, task: Task) -> None:
        """Hand the head's parameters to the optimiser."""
        assert task.head is not None
        heads = self._head_group()
        heads["params"] += [parameter for parameter in task.head.parameters() if parameter.requires_grad]
        heads["tasks"].append(task.name)

    def _head_group(self) -> dict[str, Any]:
        """The optimiser's last group, which has the parameters of all heads and names their tasks."""
        if "tasks" not in self.optimizer.param_groups[-1]:
            self.optimizer.add_param_group({"params": [], "tasks": []})
        return self.optimizer.param_groups[-1]


def _made(make: MakeOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    if not callable(make):
        raise SpclError(
            f"optimizer must make an optimiser from a list of parameters, e.g. "
            f"functools.partial(torch.optim.SGD, lr=0.1), but it is {type(make).__name__}"
        )
    optimizer = make(parameters)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise SpclError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, which the gradients of several "
            f"tasks do not allow; use e.g. torch.optim.Adam or torch.optim.SGD"
        )
    return optimizer


def _check_names(sources: Mapping[str, states.Stateful]) -> None:
    """Refuse names of sources that mean something else when loading."""
    parameters = inspect.signature(Learner.load).parameters.values()
    taken = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in sources:
        if name in taken:
            raise SpclError(f"a source cannot be saved as {name!r}, because load({name}=…) is the learner's own")


def _check_types(backbone: object, method: object, memory: object) -> None:
    """Refuse what is easily taken for a backbone, a method or a memory."""
    if not isinstance(backbone, nn.Module):
        raise SpclError(f"the backbone must be a torch.nn.Module, but it is {backbone!r:.80}")
    for name, parameter in backbone.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise SpclError(
                f"the backbone's parameter {name!r} has no shape yet; run a batch through the backbone first"
            )
    if not isinstance(method, Method):
        raise SpclError(
            f"the method must be one such as SORO(), but it is {method!r:.80}; see spcl.methods.make_method"
        )
    if not isinstance(memory, Memory | None):
        raise SpclError(f"the memory must be one such as Reservoir(100), but it is {memory!r:.80}; see spcl.memory")
