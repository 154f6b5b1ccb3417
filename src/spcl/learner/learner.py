"""The online learner: one model, tasks that come and go, one step at a time."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn

from spcl.batches import BatchLike
from spcl.checkpoint import read_checkpoint
from spcl.distributed import World, whole
from spcl.engine.model import Scenario, SharedModel
from spcl.engine.update import Update
from spcl.errors import TaskError
from spcl.learner import state as states
from spcl.learner.admission import check_arguments, check_new_task, find_task
from spcl.learner.fitting import Fitting, MomentLike
from spcl.learner.freezing import trainable
from spcl.learner.habits import check_habits, habits_state, learning_rate_factor, saved_habits
from spcl.learner.low_memory import LowMemory, low_memory_state
from spcl.learner.optimizer import MakeOptimizer, add_head
from spcl.learner.report import StepReport
from spcl.learner.step import StepOptions
from spcl.learner.task_state import Heads, Losses
from spcl.learner.trained_model import TrainedModel
from spcl.losses import Loss
from spcl.memory import Memory
from spcl.methods.base import Method
from spcl.methods.tasks import Task, classifier_task
from spcl.registry import Named
from spcl.schedules import Schedule
from spcl.stability import Stability
from spcl.transforms import Transform

__all__ = ["Learner"]

SAVED_ARGUMENTS = ("scenario", "memory_batch", "measure_stability", "capture", "seed")


class Learner(TrainedModel):
    """Trains one shared backbone, with a head per task, on any number of sources at once.

    Args:
        backbone: any module that turns a batch of inputs into features; training happens on its device. Frozen
            parameters stay, all of them in a linear probe. Batch-norm layers whose own parameters are all frozen run in
            evaluation mode while training, so that what a frozen part computes does not drift.
        method: how the tasks' gradients become one update, e.g. ``spcl.methods.SORO()``.
        optimizer: makes the optimiser from a list of parameters; by default Adam with learning rate 1e-3.
        schedule: step → factor of every group's initial learning rate, e.g. one of ``spcl.schedules``; None leaves the
            learning rates to the optimiser's groups.
        clip_norm: the largest norm of an update's gradients, those of backbone and heads together; larger ones are
            scaled down to it before the optimiser's step.
        average: decay of an exponential moving average of all trainable weights, e.g. 0.999: predictions use the
            average, training the current weights.
        predict_by: what predicts classes, by name or by name and options: the trained ``"head"``, or without its bias
            towards recent classes ``"class-means"``, ``"adjusted"`` or ``"balanced-heads"``, all from memory.
        augment: transforms inputs of new and of replayed samples on the device before they enter the network, those of
            all tasks with the same shape and type in one call, e.g. ``spcl.transforms``. Memory stores what came in.
        updates: the number of updates in a step, all on the same batches, each with its own draws from memory and its
            own augmentation.
        memory: keeps samples of earlier tasks for replay; None replays nothing.
        scenario: ``"task"``: a sample's task is known when predicting, and its loss covers that task's classes;
            ``"class"``: it is not, and the loss covers the classes of every task added so far.
        memory_batch: how many samples to replay in a step; by default as many as the step's largest batch has.
        autocast: ``torch.bfloat16`` for mixed precision.
        measure_stability: report κ, conflicts and magnitude similarity also for methods that need no Gramian; every
            gradient is then kept separately.
        capture: on a GPU, capture CUDA graphs and replay them; what cannot be captured runs eagerly.
        low_memory: never hold the gradients of all tasks, but only their Gramian: two backward passes over the joint
            batch, in the memory of plain training, without CUDA graphs. ``"auto"``: once they would not fit. Where it
            is not possible, a warning says why.
        distributed: the ranks that train this learner together, ``spcl.distributed.join_world()`` under ``torchrun``.
            All make the same calls with the same batches; those that split samples may shard the backbone.
        seed: of the initialisation of heads.

    Attributes:
        model: the backbone and the heads; :meth:`module` makes an ``nn.Module`` of them.
        optimizer: may be replaced, and its groups changed, between steps; the last group holds the heads.
        method: as given, and so all other arguments that are not described here.
        steps: the number of steps so far.

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
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        average: float | None = None,
        predict_by: Named = "head",
        augment: Transform | None = None,
        updates: int = 1,
        memory: Memory | None = None,
        scenario: Scenario = "task",
        memory_batch: int | None = None,
        autocast: torch.dtype | None = None,
        measure_stability: bool = False,
        capture: bool = True,
        low_memory: LowMemory = "auto",
        distributed: World | None = None,
        seed: int = 0,
    ) -> None:
        check_arguments(backbone, method, memory, memory_batch)
        check_habits(schedule, clip_norm, average, augment, updates)
        losses = method.joint_logits, method.settings.finished_weight
        model = SharedModel(backbone, scenario, method.make_head, seed, autocast, *losses)
        parts: Any = {"optimizer": optimizer, "distributed": distributed, "low_memory": low_memory}
        super().__init__(model, method, memory, average=average, predict_by=predict_by, capture=capture, **parts)
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.augment = augment
        self.updates = updates
        self.memory_batch = memory_batch
        self.measure_stability = measure_stability
        self.seed = seed
        self.steps = 0

    # -- tasks

    def add_task(
        self,
        name: str,
        *,
        classes: int | Sequence[str] | None = None,
        head: nn.Module | None = None,
        loss: Loss | None = None,
    ) -> None:
        """Start a task: a classifier with ``classes`` classes, or a head and a loss of its own.

        Args:
            name: its name.
            classes: the number of classes, or their names; labels are 0, 1, …, or rows of probabilities.
            head: a module on the backbone's features, for anything else: regression, dense or multi-label prediction.
            loss: (output of the head, targets) → scalar; needed with ``head``. With ``classes`` the output is the
                logits of the task's classes, class-incrementally of all classes seen, with targets to match; by default
                cross-entropy. ``spcl.losses.CrossEntropy`` has label smoothing and class weights.
        """
        check_new_task(self.model, name, classes, head, loss)
        self._heads.check_memory()
        if classes is None:
            task = Task(name, None, cast(Loss, loss), cast(nn.Module, head).to(self.model.device), 0)
        elif isinstance(classes, int):
            task = classifier_task(name, classes, len(self.classes), loss)
        else:
            task = classifier_task(name, len(classes), len(self.classes), loss, tuple(classes))
        if self.memory is not None:
            self.memory.start(name, task.classes)
        self.tasks[name] = task
        if head is not None:
            add_head(self.optimizer, task)
            self._average_all()
        if self.model.feature_dim is not None:
            self._build_heads(self.model.feature_dim)

    def finish_task(self, name: str) -> None:
        """End a task: from now on it is only replayed, and memory keeps the samples that its policy selects."""
        task = find_task(self.tasks, name)
        if task.finished:
            raise TaskError(f"task {name!r} is finished already")
        if self.memory is not None:
            joint = self.model.has_joint_logits and task.classes is not None
            describe = partial(self._logits_to_store, task=None if joint else task)
            self.memory.finish(name, describe if self.method.stores_logits else None)
        task.finished = True

    # -- training

    def step(self, batches: Mapping[str, BatchLike], meanwhile: Callable[[], object] | None = None) -> StepReport:
        """Make one update, or ``updates``, from a batch of each of the given tasks, and from memory if it has samples.

        A task whose loss or gradient is not finite is skipped, reported, and named in a warning after three in a row:
        the step is repeated without it, and the others train as if it had not been there. After a call that raises,
        unless it is the optimiser that was interrupted, training goes on as if it had not been made; of several
        updates, those before the one that raised remain. The report is that of the first update.

        Args:
            batches: (inputs, targets) of any of the running tasks, as tensors or NumPy arrays; their sizes may differ.
                Inputs may also be a dict or tuple of them with one row per sample in each, which the backbone gets as
                it is. Replayed samples of different shapes take one pass through the backbone per shape.
            meanwhile: called when a GPU's work is queued, e.g. to fetch more batches; it finishes no task.
        """
        update, options = self._plan()
        samples = self._admitted(batches)
        self._choose_engine(len(samples), self.measure_stability)
        outcome, skipped = self._runner.run(samples, update, options, meanwhile)
        self.steps += 1
        trained = [(group.task, group.y) for group in samples if group.task.name in outcome.losses]
        self._heads.observe(trained, self.memory_batch)
        return StepReport(
            step=self.steps - 1,
            losses=outcome.losses,
            weights=outcome.weights,
            before=None if outcome.before is None else Stability(outcome.before),
            after=None if outcome.after is None else Stability(outcome.after),
            skipped=skipped,
            seconds=outcome.seconds,
            memory_bytes=0 if self.memory is None else self.memory.nbytes,
        )

    def find_errors(self, batches: Mapping[str, BatchLike]) -> dict[str, TaskError]:
        """Return why batches cannot be learned, each tried alone, by task; nothing is trained. Of use after an error.

        >>> from spcl.methods import SORO
        >>> learner = Learner(nn.Linear(4, 8), SORO())
        >>> learner.add_task("camera", classes=3)
        >>> learner.find_errors({"camera": (torch.randn(2, 4), torch.tensor([0, 3]))})
        {'camera': TaskError("task 'camera' has classes 0 to 2, but the batch has label 3; ...")}
        """
        refused = self._admission.errors(batches)
        if refused or self.distributed is not None:  # what a rank computes, the others do not know
            return refused
        return self._runner.errors(self._admitted(batches), *self._plan())

    def _plan(self) -> tuple[Update, StepOptions]:
        factor = learning_rate_factor(self.schedule, self.steps)
        options = StepOptions(self.memory_batch, self.measure_stability, self.augment, self.updates)
        return Update(self.optimizer, factor, self.clip_norm, self._average), options

    def fit(
        self,
        stream: Iterable[MomentLike],
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        every: float = 60.0,
        on_start: Callable[[str], object] | None = None,
        on_step: Callable[[StepReport], object] | None = None,
        **sources: states.Stateful,
    ) -> None:
        """Train on the moments of a stream until it ends: add the tasks that start, step, finish those that end.

        A batch that cannot be learned raises a :class:`~spcl.errors.TaskError` once the rest of its moment is learned
        and saved; another call goes on with the next moment. A checkpoint is saved between two moments and at the end.
        ``Learner.load(checkpoint, …, stream=stream)``, where the stream has a state, and ``fit`` with the same
        arguments continue exactly.

        Args:
            stream: e.g. a ``ParallelStream`` or ``LiveStream``, or any iterable of objects with ``batches``,
                ``started`` and ``ended``.
            checkpoint: the file for :meth:`save`; the stream is saved along as ``stream``.
            every: seconds between checkpoints; 0 saves after every moment.
            on_start: adds a task that starts, given its name. By default a task that was not added before gets the
                number or names of classes in ``stream.classes``.
            on_step: receives the report of every step, e.g. to advance a schedule.
            sources: schedules and whatever else is to be saved along, as with :meth:`save`.
        """
        Fitting(self, checkpoint, every, on_start, on_step, sources).run(stream)

    # -- checkpoints

    def save(self, path: str | os.PathLike[str], /, **sources: states.Stateful) -> None:
        """Write a checkpoint, from which :meth:`load` continues exactly.

        One safetensors file, checksummed, replaced atomically; the previous one stays. Of the ranks, the first writes.

        Args:
            path: the file.
            sources: streams, schedules and whatever else has ``state_dict()``, saved under these names.
        """
        states.check_source_names(type(self).load, sources)
        writes = self.distributed is None or self.distributed.is_first
        if writes or self._is_sharded:
            states.write_state(path, self._state(), sources, writes)

    def model_state(self) -> dict[str, Any]:
        """Return the model as plain data and tensors: backbone, tasks with their heads, and method.

        :meth:`load` makes a learner of it that predicts the same; its optimiser is new and its memory empty.
        """
        self._present_heads([])  # makes those of the present weights
        return whole({"learner": self._settings()} | states.model_state(self._parts()))

    def _state(self) -> dict[str, Any]:
        return {"learner": self._settings()} | states.parts_state(self._parts())

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {name: getattr(self, name) for name in (*SAVED_ARGUMENTS, "steps")}
        settings |= {"autocast": self.model.autocast is not None, "feature_dim": self.model.feature_dim}
        if self._has_refrozen:
            settings["trainable"] = states.trainable_names(self.optimizer, self.model.backbone)
        return settings | low_memory_state(self._low_memory) | habits_state(vars(self))

    @classmethod
    def load(
        cls,
        checkpoint: str | os.PathLike[str] | Mapping[str, Any],
        /,
        *,
        backbone: nn.Module,
        method: Method | None = None,
        optimizer: MakeOptimizer | None = None,
        memory: Memory | None = None,
        schedule: Schedule | None = None,
        augment: Transform | None = None,
        distributed: World | None = None,
        heads: Heads | None = None,
        losses: Losses | None = None,
        **sources: states.Stateful,
    ) -> Self:
        """Return the learner as it was saved, and restore the random number generators.

        The backbone is changed only when all of the checkpoint fits. Frozen parameters are frozen again.

        Args:
            checkpoint: the file, its content as of :func:`spcl.checkpoint.read_checkpoint`, or a :meth:`model_state`.
            backbone: a module of the same architecture, which gets the saved weights.
            method, memory: needed only if it is not one of this package.
            optimizer: needed only if it is not of ``torch.optim``.
            schedule, augment: needed if the learner had them, because functions are not saved.
            distributed: the ranks that train on, as many as one likes.
            heads: head and loss of every task that was added with its own, by name.
            losses: the loss of every classifier that was added with one other than a ``CrossEntropy``, by name.
            sources: what was saved along, each restored by its ``load_state_dict``. A schedule needs the loaded
                learner's optimiser: make it afterwards and pass it ``read_checkpoint(path)["sources"][name]``.
        """
        state = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
        states.check_state(state, backbone, sources)
        parts = states.saved_parts(state, method, optimizer, memory) | {"distributed": distributed}
        habits = saved_habits(state["learner"], schedule=schedule, augment=augment)
        with trainable(backbone, states.saved_trainable(state, backbone)):
            learner = cls._with_settings(state["learner"], backbone=backbone, **parts, **habits)
            states.restore_parts(learner._parts(), state, heads or {}, losses or {}, sources)
        return learner

    @classmethod
    def _with_settings(cls, settings: Mapping[str, Any], **arguments: Any) -> Self:
        options = {name: settings[name] for name in SAVED_ARGUMENTS}
        options |= {"autocast": torch.bfloat16 if settings["autocast"] else None}
        learner = cls(**arguments, **options, low_memory=settings.get("low_memory", "auto"))
        if settings.get("holds_gradients") is False:
            learner._use_low_memory()
        learner.steps = settings["steps"]
        learner._has_refrozen = "trainable" in settings
        return learner
