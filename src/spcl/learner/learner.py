"""The online learner: one model, tasks that come and go, one step at a time."""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from spcl._util.registry import Named
from spcl.batches import BatchLike, InputsLike, describe
from spcl.checkpoint import KEPT, checked_content, read_checkpoint
from spcl.engine.base import Engine, Stateful
from spcl.engine.model import Samples, SharedModel
from spcl.engine.ranks import World, whole
from spcl.engine.ranks.sharded import ShardedAverage, refuse_sharded
from spcl.engine.update import Update, WeightAverage
from spcl.errors import SpclError, TaskError
from spcl.learner import state as states
from spcl.learner.checks import (
    BatchCheck,
    OneCallAtATime,
    RankCheck,
    check_arguments,
    find_sources,
    find_task,
    is_number,
    new_classes,
    new_sources,
    new_task,
    start_in_memory,
)
from spcl.learner.engines import Engines
from spcl.learner.fit import Fit, MomentLike
from spcl.learner.moving import destination, move
from spcl.learner.parameters import (
    MakeOptimizer,
    add_encoder,
    add_head,
    exchange_parameters,
    frozen_normalisations,
    groups_undone_if_it_raises,
    keep_trainable,
    matching,
    optimizer_of,
    shares_trained,
    trainable,
    uncompiled,
)
from spcl.learner.prediction import PREDICT_BATCH, Predictor
from spcl.learner.predictors import PredictionHeads
from spcl.learner.step import Result, Step, StepReport
from spcl.losses import Loss
from spcl.memory import Memory
from spcl.methods.base import Method
from spcl.options import OPTIONS, LearnerOptions, LowMemory, Scenario, restored_options, saved_options
from spcl.schedules import Schedule
from spcl.stability import Stability
from spcl.tasks import Task, TaskSource
from spcl.transforms import Transform


class Learner:
    """Trains one shared backbone, with a head per task, on any number of sources at once.

    A learner takes one call at a time: while one thread is in a call, calls from other threads raise an error. To
    predict in other threads use :meth:`snapshot`, whose copy any number of threads may use while the learner trains.
    Within a step, e.g. in a loss, the same thread may predict, but not add, finish or save. Between steps the backbone
    may get, lose or exchange modules and parameters: the next step trains what is there then.

    Args:
        backbone: any module that turns a batch of inputs into features; training happens on its device. Parameters with
            ``requires_grad=False`` are not trained; freeze all of them for a linear probe. Batch-norm layers whose own
            parameters are all frozen run in evaluation mode, so that their running averages do not change.
        method: how the tasks' gradients become one update, e.g. ``spcl.methods.SORO()``.
        optimizer: makes the optimiser from a list of parameters; by default Adam with learning rate 1e-3.
        schedule: step → factor of every group's initial learning rate, e.g. one of ``spcl.schedules``; None leaves the
            learning rates to the optimiser's groups.
        clip_norm: the largest norm of all gradients of an update, backbone and heads together; a larger one is scaled
            down before the optimiser's step.
        average: decay of an exponential moving average of all trainable weights, e.g. 0.999: predictions use the
            average, training the current weights.
        predict_by: what predicts classes: the trained ``"head"``, or heads made from memory, which favour recent
            classes less: ``"class-means"``, ``"adjusted"``, ``"balanced-heads"``; a name, or a dict of name and
            options.
        augment: transforms inputs, new and replayed, on the device, e.g. ``spcl.transforms``; one call for all tasks
            whose inputs have the same shape and type. Memory stores the untransformed inputs.
        updates: the number of updates in a step, all on the same batches, each with its own draws from memory and its
            own augmentation.
        memory: keeps samples of earlier tasks for replay; None replays nothing.
        scenario: ``"task"``: a sample's task is known when predicting, and its loss covers that task's classes;
            ``"class"``: it is not, and the loss covers the classes of every task added so far; ``"domain"``: there is
            one task, which all sources answer.
        memory_batch: how many samples to replay in a step; by default as many as the step's largest batch has.
        micro_batch: the largest number of samples in a pass, to save memory: a larger batch is computed in parts whose
            gradients add up to the gradient of the batch. Batch-norm, however, normalises every part by the part's own
            statistics. The losses must be means over samples. No CUDA graphs are captured.
        autocast: ``torch.bfloat16`` for mixed precision.
        measure_stability: keep every gradient separately, so that every report has κ, conflicts and magnitude
            similarity; methods with ``reduction="none"`` always do.
        capture: on a GPU, capture CUDA graphs and replay them; what cannot be captured runs eagerly.
        low_memory: hold the Gramian instead of the gradients: two backward passes, the memory of plain training, no
            CUDA graphs. ``"auto"``: only when the gradients would not fit. A warning says if the method rules it out.
        distributed: the ranks that train this learner together, ``spcl.distributed.join_world()`` under ``torchrun``.
            All make the same calls with the same batches; those that split samples may shard the backbone.
        seed: of the initialisation of heads.

    Attributes:
        model: the backbone and the heads; :meth:`module` makes an ``nn.Module`` of them.
        optimizer: may be replaced, and its groups changed, between steps; the last group holds heads and encoders.
        steps: the number of steps so far.

    The other arguments are attributes of the same name.

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
        micro_batch: int | None = None,
        autocast: torch.dtype | None = None,
        measure_stability: bool = False,
        capture: bool = True,
        low_memory: LowMemory = "auto",
        distributed: World | None = None,
        seed: int = 0,
    ) -> None:
        check_arguments(backbone, method, memory, schedule=schedule, augment=augment)
        LearnerOptions(
            scenario=scenario,
            seed=seed,
            clip_norm=clip_norm,
            average=average,
            predict_by=predict_by,
            updates=updates,
            memory_batch=memory_batch,
            micro_batch=micro_batch,
            measure_stability=measure_stability,
            capture=capture,
            low_memory=low_memory,
        )
        self.model = SharedModel(
            backbone,
            scenario,
            method.make_head,
            seed,
            autocast,
            joint_logits=method.joint_logits,
            finished_weight=method.settings.finished_weight,
        )
        self.method = method
        self.memory = memory
        self.schedule = schedule
        self.clip_norm = clip_norm
        self.average = average
        self.predict_by = predict_by
        self.augment = augment
        self.updates = updates
        self.memory_batch = memory_batch
        self.micro_batch = micro_batch
        self.measure_stability = measure_stability
        self.capture = capture
        self.low_memory = low_memory
        self.distributed = distributed
        self.seed = seed
        self.steps = 0
        self._meanwhile: Callable[[], object] | None = None  # what `fit` does while a GPU computes
        self._calls = OneCallAtATime()
        self._engines = self._new_engines()
        self._ranks = None if distributed is None else RankCheck(distributed)
        self._average = self._new_average()
        self._heads = PredictionHeads(predict_by, memory)
        self._predictor = Predictor(self.model, self._average, self._heads, self._calls)
        self._has_refrozen = False
        self._use_engine(self._engines.make())
        if distributed is not None and distributed.is_first and self.fallback_reason is not None:
            warnings.warn(self.fallback_reason, RuntimeWarning, stacklevel=2)
        shared = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        self.optimizer = optimizer_of(optimizer or torch.optim.Adam, shared, like)
        self._follow_trained()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIONS:
            LearnerOptions(**{name: value})  # raises an error if the option may not have this value
        super().__setattr__(name, value)

    # -- tasks

    @property
    def scenario(self) -> Scenario:
        """Task-, class- or domain-incremental."""
        return self.model.scenario

    @property
    def tasks(self) -> dict[str, Task]:
        """All tasks ever added, in that order."""
        return self.model.tasks

    @property
    def sources(self) -> dict[str, TaskSource]:
        """All sources ever added, in that order."""
        return self.model.sources

    @property
    def active_tasks(self) -> list[str]:
        """The tasks that are not finished."""
        return self._predictor.active_tasks

    @property
    def active_sources(self) -> list[str]:
        """The sources that have not ended."""
        return self._predictor.active_sources

    @property
    def classes(self) -> list[tuple[str, int]]:
        """(task, label) of every class seen, in the order of class-incremental predictions."""
        return self._predictor.classes

    @property
    def class_names(self) -> list[tuple[str, str]]:
        """(task, name) of every class in :attr:`classes`; the label as text where a task's classes have no names."""
        return self._predictor.class_names

    def add_task(
        self,
        name: str,
        *,
        classes: int | Sequence[str] | None = None,
        head: nn.Module | None = None,
        loss: Loss | None = None,
    ) -> None:
        """Start a task: a classifier with ``classes`` classes, or a head and a loss of its own.

        It has one source, of its own name, which gives way to the first one that :meth:`add_source` adds, unless it has
        had a batch.

        Args:
            name: its name.
            classes: the number of classes, or their names; labels are 0, 1, …, or rows of probabilities.
            head: a module on the backbone's features, for anything else: regression, dense or multi-label prediction.
            loss: (output of the head, targets) → scalar; needed with ``head``. With ``classes`` the output is the
                logits of the task's classes, class-incrementally of all classes seen, with targets to match; by default
                cross-entropy. ``spcl.losses.CrossEntropy`` has label smoothing and class weights.
        """
        with self._calls.changing("add_task"):
            self._heads.check_memory()
            task = new_task(self.model, name, classes, head, loss)
            with self._added_parts_undone_if_it_raises():
                self.tasks[name] = task
                self.model.add_source(TaskSource(name, task, is_implied=True))
                if head is not None:
                    add_head(self.optimizer, task)
                    self._follow_trained()
                if self.model.feature_dim is not None:
                    self._build_heads(self.model.feature_dim)
                if self.memory is not None:
                    start_in_memory(self.memory, self.sources[name])

    def add_source(
        self, name: str, task: str | Sequence[str] | None = None, encoder: nn.Module | Named | None = None
    ) -> None:
        """Add a source of a task's samples, or start one again that has ended, with all that is known of it.

        Each source brings batches of its own and has a gradient of its own; any number of sources may answer one task.

        Args:
            name: its name.
            task: the name of the task that its samples answer; not needed for a source that returns. Or the names of
                several: then a batch has a dict of targets by task, takes one pass, and gives a gradient for each,
                reported as ``source/task``.
            encoder: a module in front of the backbone, through which its samples pass. Sources may have encoders in
                common, or parts of them: what several sources can reach is shared, and its gradients are weighed with
                the backbone's; what a single source can reach has that source's plain gradient, like the head of a
                task. Or the name of an encoder of its own, or its name and options: ``"affine"``, a learned scale and
                shift of every feature or channel, the identity at first.

        >>> from spcl.methods import SORO
        >>> learner = Learner(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), SORO())
        >>> learner.add_task("activity", classes=["sit", "walk"])
        >>> learner.add_source("anna", task="activity")
        >>> learner.add_source("ben", task="activity", encoder=nn.Linear(6, 4))
        >>> y = torch.arange(8) % 2
        >>> report = learner.step({"anna": (torch.randn(8, 4), y), "ben": (torch.randn(8, 6), y)})
        >>> learner.finish_source("ben")
        >>> learner.predict(torch.randn(3, 6), source="ben").shape
        torch.Size([3])
        """
        with self._calls.changing("add_source"):
            self._heads.check_memory()
            sources = new_sources(self.model, name, task, encoder)
            with self._added_parts_undone_if_it_raises():
                for source in sources:
                    self._add_source(source)

    def _add_source(self, source: TaskSource) -> None:
        if not source.finished:
            for each in [each for each in source.task.sources.values() if each.is_implied and each.signature is None]:
                self.model.remove_source(each)
                if self.memory is not None:
                    self.memory.withdraw(each.name)
        if self.memory is not None:
            start_in_memory(self.memory, source)
        if not source.finished:
            self.model.add_source(source)
            if source.encoder is not None:
                add_encoder(self.optimizer, source)
                self._follow_trained()
        source.finished = False

    def add_classes(self, task: str, classes: int | Sequence[str]) -> None:
        """Give a classifier more classes, which come after those that it has; what its head has learned stays.

        Class-incrementally, the classes of later tasks move up in :attr:`classes`. Not for a task that learns
        probabilities, whose samples and memory are of the old number.

        Args:
            task: its name.
            classes: how many more, or the names of the new ones.
        """
        with self._calls.changing("add_classes"):
            found = find_task(self.tasks, task)
            count, names = new_classes(found, classes)
            before = (found.classes or 0) + found.offset
            head = self.model.larger_head(found, count)
            if self.memory is not None:
                self.memory.add_classes(
                    task, (found.classes or 0) + count, before if self.model.has_joint_logits else None
                )
            if head is not None and found.head is not None:
                exchange_parameters(self.optimizer, found.head, head)
                if self._average is not None:
                    self._average.exchange(found.head, head)
            self.model.add_classes(found, count, names, head)
            self._follow_trained()
            self._use_engine(self._engines.make())

    def finish_task(self, name: str) -> None:
        """End all sources of a task: from now on it is only replayed."""
        with self._calls.changing("finish_task"):
            task = find_task(self.tasks, name)
            if task.finished:
                raise TaskError(f"task {name!r} is finished already")
            for source in task.sources.values():
                if not source.finished:
                    self._finish(source)

    def finish_source(self, name: str) -> None:
        """End a source: from now on it is only replayed, and memory keeps the samples that its policy selects."""
        with self._calls.changing("finish_source"):
            sources = [source for source in find_sources(self.model, name) if not source.finished]
            if not sources:
                raise TaskError(f"{find_sources(self.model, name)[0].words} is finished already")
            for source in sources:
                self._finish(source)

    def _finish(self, source: TaskSource) -> None:
        if self.memory is not None:
            joint = self.model.has_joint_logits and source.task.classes is not None
            describe = partial(
                self._predictor.logits_to_store, task=None if joint else source.task, encoder=source.encoder
            )
            self.memory.finish(source.name, describe if self.method.stores_logits else None)
        source.finished = True

    # -- training

    def step(self, batches: Mapping[str, BatchLike]) -> StepReport:
        """Make one update, or ``updates``, from a batch of each given source, and from memory if it has samples.

        A source with a non-finite loss or gradient is skipped and reported, and the step is repeated without it; after
        three skips in a row a warning names it. If the call raises, the current update is undone, earlier updates
        remain; only an interrupted optimiser step cannot be undone. The report describes the first update, except
        ``skipped`` and ``seconds``, which cover all.

        Samples without a label, −100 (PyTorch's ``ignore_index``) or where targets are numbers NaN, are neither learned
        nor stored, a source without any label takes no part, and without any source nothing is updated.

        Args:
            batches: (inputs, targets) of any of the running sources, by name, as tensors or NumPy arrays; their sizes
                may differ. Targets of a source that answers several tasks are a dict by task, of any of them.
                Inputs may also be a dict or tuple of them with one row per sample in each, which the backbone gets as
                it is. Float64 and float32 are converted to the backbone's type. Replayed samples of different shapes
                take one pass through the backbone per shape.
        """
        with self._calls.changing("step"):
            self._take_in_new_parameters()
            update = self._new_update()
            samples = self._checked(batches)
            if self._ranks is not None:
                self._ranks.check(self.model, self.method)
            self._choose_engine(len(samples))
            result = self._step.run(samples, update, self, self._meanwhile) if samples else Result()
            self.steps += 1
            if self._heads.observes:
                trained = [(group.task, group.y) for group in samples if group.name in result.losses]
                self._heads.observe(trained, self.memory_batch)
        return StepReport(
            step=self.steps - 1,
            losses=result.losses,
            weights=result.weights,
            before=None if result.before is None else Stability(result.before),
            after=None if result.after is None else Stability(result.after),
            skipped=result.skipped,
            seconds=result.seconds,
            memory_bytes=0 if self.memory is None else self.memory.nbytes,
            unlabelled=_left_out(batches, samples),
        )

    @contextmanager
    def _while_computing(self, *works: Callable[[], object] | None) -> Iterator[None]:
        """Run these functions once, while a GPU computes the block's step, or at the end of the block."""
        pending = [work for work in works if work is not None]

        def work() -> None:
            while pending:
                pending.pop()()

        before, self._meanwhile = self._meanwhile, work
        try:
            yield
            work()
        finally:
            self._meanwhile = before

    def find_errors(self, batches: Mapping[str, BatchLike]) -> dict[str, TaskError]:
        """Try each batch alone, without training; return the errors by source. For use after a step has raised.

        >>> from spcl.methods import SORO
        >>> learner = Learner(nn.Linear(4, 8), SORO())
        >>> learner.add_task("camera", classes=3)
        >>> learner.find_errors({"camera": (torch.randn(2, 4), torch.tensor([0, 3]))})
        {'camera': TaskError("task 'camera' has classes 0 to 2, but the batch has label 3; ...")}
        """
        with self._calls.changing("find_errors"):
            self._take_in_new_parameters()
            refused = self._batch_check.errors(batches)
            if refused or self.distributed is not None:  # what a rank computes, the others do not know
                return refused
            return self._step.try_each(self._checked(batches), self._new_update(), self)

    def _new_update(self) -> Update:
        factor = None if self.schedule is None else _learning_rate_factor(self.schedule, self.steps)
        return Update(self.optimizer, factor, self.clip_norm, self._average)

    def fit(
        self,
        stream: Iterable[MomentLike],
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        every: float = 60.0,
        on_start: Callable[[str], object] | None = None,
        before_step: Callable[[Mapping[str, BatchLike]], object] | None = None,
        on_step: Callable[[StepReport], object] | None = None,
        on_end: Callable[[str], object] | None = None,
        on_refused: Callable[[str, BatchLike | None, SpclError], object] | None = None,
        on_moment: Callable[[MomentLike, StepReport | None], object] | None = None,
        on_checkpoint: Callable[[], object] | None = None,
        meanwhile: Callable[[], object] | None = None,
        **sources: Stateful,
    ) -> None:
        """Train on the moments of a stream until it ends: add the sources that start, step, finish those that end.

        A source that starts again, after it has ended, returns with all that is known of it.

        A batch that cannot be learned raises a :class:`~spcl.errors.TaskError` once the rest of its moment is learned
        and saved; another call continues with the next moment. Checkpoints are saved between moments and at the end.
        ``Learner.load(checkpoint, …, stream=stream)``, where the stream has a state, and ``fit`` with the same
        arguments continue exactly.

        For every moment, in this order::

            on_start(source)          of every source that is new
            before_step(batches)
            step                      with meanwhile() while a GPU computes; repeated without what cannot be learned
            on_step(report)
            on_refused(source, …)     of every batch that cannot be learned
            on_end(source)            of every source that has ended and was finished
            on_moment(moment, report)
            on_checkpoint()           after a checkpoint, if it is time for one

        Args:
            stream: e.g. a ``ParallelStream`` or ``LiveStream``, or any iterable of objects with ``batches``,
                ``started`` and ``ended``.
            checkpoint: the file for :meth:`save`; the stream is saved along as ``stream``. While one call saves there,
                others to the same file are refused, also of other processes.
            every: seconds between checkpoints; 0 saves after every moment.
            on_start: adds a source that is new, given its name, and its task. By default the task is the one that
                ``stream.tasks`` has for the source, else one of the source's name; a task that was not added before
                gets the number or names of classes in ``stream.classes``, and a source its encoder in
                ``stream.encoders``.
            before_step: receives the batches by source, including batches that are refused later.
            on_step: receives the report of every step, e.g. to advance a schedule.
            on_end: receives the name of a source that was finished.
            on_refused: receives source, batch and error if a batch cannot be learned or its source not be added, and
                None for the batch if a source cannot be finished. Nothing is then raised.
            on_moment: receives every moment and the report of its step; None without a step.
            on_checkpoint: called after every checkpoint.
            meanwhile: called once a step, while a GPU computes, else after the step; so is ``stream.prefetch``, if it
                exists.
            sources: schedules and whatever else is to be saved along, as with :meth:`save`.
        """
        states.check_sources(self.fit, type(self).load, sources)
        Fit(
            self,
            checkpoint=checkpoint,
            every=every,
            sources=sources,
            on_start=on_start,
            before_step=before_step,
            on_step=on_step,
            on_end=on_end,
            on_refused=on_refused,
            on_moment=on_moment,
            on_checkpoint=on_checkpoint,
            meanwhile=meanwhile,
        ).run(stream)

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move the learner to a device, convert it to a floating-point type, or both; return it.

        Backbone, heads, optimiser state and the average of the weights move. Samples in memory are converted with the
        model. They stay where they are stored, but leave an accelerator with the model unless memory was made with a
        device. Steps continue as they would have, up to rounding.

        >>> from spcl.methods import SORO
        >>> learner = Learner(nn.Linear(4, 8), SORO()).to(torch.float64)
        >>> learner.model.backbone.weight.dtype
        torch.float64
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        with self._calls.changing("to"):
            if self.distributed is not None:
                raise SpclError("a learner of several ranks cannot be moved; move the backbone, then make the learner")
            self._take_in_new_parameters()
            place = destination(device, dtype, (self.model.device, self.model.dtype))
            history = states.history_of(self._engine)
            is_low_memory = self._engines.is_low_memory
            self._average = move(self._parts(), *place)
            self._predictor = Predictor(self.model, self._average, self._heads, self._calls)
            self._engines = self._new_engines()
            self._engines.is_low_memory = is_low_memory
            self._use_engine(self._engines.make())
            states.restore_history(self._engine, history)
        return self

    def freeze(self, *patterns: str) -> None:
        """Stop training the backbone's parameters whose names match any of these patterns; without patterns all.

        The optimiser and the average of the weights forget them. Batch-norm layers whose own parameters are then all
        frozen run in evaluation mode. Heads are trained on.

        Args:
            patterns: of names as in ``backbone.named_parameters()``, with the wildcards ``*``, ``?`` and ``[…]``.
        """
        with self._calls.changing("freeze"):
            frozen = matching(self.model.backbone, patterns)
            self._train({each for each in self.model.backbone.parameters() if each.requires_grad} - frozen)

    def unfreeze(self, *patterns: str) -> None:
        """Train the backbone's parameters whose names match any of these patterns again; without patterns all.

        Parameters in no optimiser group join the first group.
        """
        with self._calls.changing("unfreeze"):
            trained = {each for each in self.model.backbone.parameters() if each.requires_grad}
            self._train(trained | matching(self.model.backbone, patterns))

    @property
    def fallback_reason(self) -> str | None:
        """Why the latest step took a slower path; None if it took the fastest, or there is no faster one.

        Either its batches did not all share one pass, on a CPU or in CUDA graphs, or no CUDA graphs are captured though
        ``capture`` asks for them. Results are the same up to rounding.

        >>> from spcl.methods import SORO
        >>> learner = Learner(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None)), SORO())
        >>> for task in ("camera", "radar"):
        ...     learner.add_task(task, classes=2)
        >>> batches = {task: (torch.randn(6, 4), torch.arange(6) % 2) for task in learner.tasks}
        >>> report = learner.step(batches)
        >>> learner.fallback_reason
        'batch-norm with momentum=None averages over all batches'
        """
        return self._engine.fallback_reason

    # -- predictions

    def predict(
        self,
        x: InputsLike,
        task: str | None = None,
        *,
        source: str | None = None,
        encoder: nn.Module | None = None,
        batch_size: int = PREDICT_BATCH,
    ) -> Tensor:
        """Return labels for inputs, on the model's device.

        With ``task``, that task's labels (or the output of its own head). Without, class-incremental: indices into
        :attr:`classes`, over all classes seen; domain-incremental: the labels of the one task.

        With ``source``, inputs pass that source's encoder, and the task is the source's, unless predictions are
        class-incremental. With ``encoder`` they pass that module: the way for somebody who was never seen. With
        neither, they pass the encoder that all sources of the task share; encoders made by name are skipped, since they
        start as the identity, unless the task has a single source, of its own name.

        Inputs must have the shape and type that the task was trained on; floating-point numbers are converted. An input
        without a prediction, because its scores are NaN, raises an error: :meth:`logits` gives the scores as they are.
        """
        return self._predictor.predict(x, task, source=source, encoder=encoder, batch_size=batch_size)

    def predict_proba(
        self,
        x: InputsLike,
        task: str | None = None,
        *,
        source: str | None = None,
        encoder: nn.Module | None = None,
        batch_size: int = PREDICT_BATCH,
    ) -> Tensor:
        """Return the probabilities of a classifier's classes, or of all classes seen: the softmax of the logits."""
        return self._predictor.predict_proba(x, task, source=source, encoder=encoder, batch_size=batch_size)

    def logits(
        self,
        x: InputsLike,
        task: str | None = None,
        *,
        source: str | None = None,
        encoder: nn.Module | None = None,
        batch_size: int = PREDICT_BATCH,
    ) -> Tensor:
        """Return the scores behind :meth:`predict`, of ``batch_size`` inputs at a time.

        They may be NaN, and the inputs may be any that the network takes.
        """
        return self._predictor.logits(x, task, source=source, encoder=encoder, batch_size=batch_size)

    def evaluate(
        self,
        loader: Iterable[BatchLike],
        task: str | None = None,
        *,
        source: str | None = None,
        encoder: nn.Module | None = None,
    ) -> float:
        """Return the accuracy of a classifier, from 0 to 1, or the mean loss of another task, on (inputs, targets).

        Labels are the task's, or probabilities: then the most probable class counts. A class-incremental prediction is
        correct if it is the right class among all classes seen; without ``task`` and ``source``, labels are indices
        into :attr:`classes`. Samples without a label (−100, or NaN) are left out, and where the model gives NaN, the
        prediction is wrong. The mean loss is over the samples, of a loss that is itself a mean over its batch.
        ``source`` and ``encoder`` are as for :meth:`predict`.
        """
        return self._predictor.evaluate(loader, task, source=source, encoder=encoder)

    def module(
        self, task: str | None = None, *, source: str | None = None, encoder: nn.Module | None = None
    ) -> nn.Module:
        """Return encoder, backbone and head of a task as a plain module; without a task, with the heads of all classes.

        Which encoder and task, ``source`` and ``encoder`` say as for :meth:`predict`. It shares parameters (averaged
        weights, where there are any) and buffers with this model, so that it follows further training, but has modes of
        its own: it is in evaluation mode. It computes in the precision of its parameters, without autocast, and takes
        inputs on their device. Tasks that are added later are not part of it. If ``predict_by`` is not ``"head"``, it
        has the current prediction heads, which later training does not change.
        """
        return self._predictor.module(task, source=source, encoder=encoder)

    def snapshot(self) -> Predictor:
        """Return a predictor with copies of the weights and heads that predict now, which follow no training."""
        return self._predictor.snapshot()

    # -- checkpoints

    def save(self, path: str | os.PathLike[str], /, *, keep: int = KEPT, **sources: Stateful) -> None:
        """Write a checkpoint, from which :meth:`load` continues exactly.

        One safetensors file, checksummed, replaced atomically; the previous one stays. Of the ranks, the first writes.

        Args:
            path: the file.
            keep: how many checkpoints to keep, the newest included.
            sources: streams, schedules and whatever else has ``state_dict()``, saved under these names.
        """
        states.check_sources(self.save, type(self).load, sources)
        writes = self.distributed is None or self.distributed.is_first
        with self._calls.changing("save"):
            self._take_in_new_parameters()
            if writes or self._engines.is_sharded:
                states.write_state(path, self._state(), sources, writes, keep)

    def model_state(self) -> dict[str, Any]:
        """Return the model as plain data and tensors: backbone, tasks with their heads, and method.

        :meth:`load` makes a learner of it that predicts the same; its optimiser is new and its memory empty.
        """
        with self._calls.changing("model_state"):
            self._take_in_new_parameters()
            self._predictor.present_heads([])  # makes the heads that predict with the current weights
            return whole({"learner": self._settings()} | states.model_state(self._parts()))

    def _state(self) -> dict[str, Any]:
        return {"learner": self._settings()} | states.parts_state(self._parts())

    def _settings(self) -> dict[str, Any]:
        """Return the learner's own settings for a checkpoint; of a function, only that there was one."""
        settings = saved_options(self) | {"steps": self.steps, "feature_dim": self.model.feature_dim}
        settings["autocast"] = self.model.autocast is not None
        if self._has_refrozen:
            settings["trainable"] = states.trainable_names(self.optimizer, self.model.backbone)
        if self._engines.is_low_memory:  # a resumed learner keeps low memory even if the gradients would fit
            settings["holds_gradients"] = False
        return settings | {name: True for name in ("schedule", "augment") if getattr(self, name) is not None}

    def _parts(self) -> states.SavedParts:
        return states.SavedParts(
            model=self.model,
            optimizer=self.optimizer,
            method=self.method,
            memory=self.memory,
            average=self._average,
            engine=self._engine,
            heads=self._heads,
        )

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
        heads: states.Heads | None = None,
        losses: states.Losses | None = None,
        encoders: states.Encoders | None = None,
        **sources: Stateful,
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
            encoders: the encoder of every source that was added with one other than a name, by the source's name; of
                sources that have one in common, it is enough to name one. Encoders of sources that the checkpoint does
                not have yet are left out.
            sources: what was saved along, each restored by its ``load_state_dict``. A schedule needs the loaded
                learner's optimiser: make it afterwards and pass it ``read_checkpoint(path)["sources"][name]``.
        """
        state = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
        with checked_content("the checkpoint" if isinstance(checkpoint, Mapping) else os.fspath(checkpoint)):
            states.check_state(state, backbone, sources)
            parts = states.saved_parts(state, method, optimizer, memory)
            functions = states.checked_functions(state, schedule=schedule, augment=augment)
            settings = state["learner"]
            with trainable(backbone, states.saved_trainable(state, backbone)):
                learner = cls(
                    backbone,
                    **parts,
                    **functions,
                    **restored_options(settings),
                    autocast=torch.bfloat16 if settings["autocast"] else None,
                    distributed=distributed,
                )
                learner.steps = settings["steps"]
                learner._has_refrozen = "trainable" in settings
                if settings.get("holds_gradients") is False:
                    learner._use_low_memory()
                states.restore_parts(
                    learner._parts(),
                    state,
                    heads=heads or {},
                    losses=losses or {},
                    encoders=encoders or {},
                    sources=sources,
                )
        return learner

    # -- what trains

    def _take_in_new_parameters(self) -> None:
        """Rebuild the engine if the backbone's modules or parameters changed.

        With several ranks nothing is rebuilt: the next step raises.
        """
        if self._ranks is None and self._batch_check.removed_parameters() is not None:
            self._train({each for each in self.model.backbone.parameters() if each.requires_grad})

    def _train(self, chosen: set[nn.Parameter]) -> None:
        """Train these parameters of the backbone, and no others, from now on."""
        backbone = self.model.backbone
        refuse_sharded(backbone, "frozen or unfrozen")
        if any(shares_trained(each, [backbone]) for each in self.model.modules()[1:]):
            raise SpclError(
                "the backbone shares parameters with a head or encoder by now; give the backbone a copy of them"
            )
        frozen_layers, removed = frozen_normalisations(backbone), self._batch_check.removed_parameters() or set()
        with trainable(backbone, chosen):
            engine = self._engines.make()
        for parameter in backbone.parameters():
            parameter.grad = None
        for layer in frozen_layers:
            layer.train(backbone.training)
        self.model.forget_features()
        self._use_engine(engine)
        if self._ranks is not None:
            self._ranks.forget()
        keep_trainable(self.optimizer, backbone.parameters(), removed)
        self._follow_trained()
        self._has_refrozen = True

    def _new_engines(self) -> Engines:
        return Engines(
            self.model,
            self.method,
            capture=self.capture,
            low_memory=self.low_memory,
            micro_batch=self.micro_batch,
            distributed=self.distributed,
        )

    def _use_engine(self, engine: Engine) -> None:
        self._engine = engine
        self._step = Step(engine, self.model, self.method, self.memory)
        self._batch_check = BatchCheck(self.model, self.method, self.memory, self._ranks, self._engines.is_sharded)

    def _choose_engine(self, tasks: int) -> None:
        """Switch to the low-memory engine if the gradients of a step of ``tasks`` tasks would not fit."""
        if self.measure_stability or self.method.reduction == "none":
            rows = tasks + (self.memory is not None) + (self.method.settings.alpha > 0.0)
            gradients = self._engine.gradients
            if rows > len(gradients.buffer) and self._engines.should_use_low_memory(rows, gradients):
                self._use_low_memory()

    def _use_low_memory(self) -> None:
        self._engines.is_low_memory = True
        for parameter in self._engine.gradients.parameters:
            parameter.grad = None  # a view of the gradient matrix
        self._use_engine(self._engines.make())

    def _checked(self, batches: Mapping[str, BatchLike]) -> list[Samples]:
        """Return the batches of a step once they are checked; make encoders and heads of sources that are new."""
        samples = self._batch_check.check(batches)
        if new := [group for group in samples if group.source.signature is None]:
            with self._batch_check.encoders_for(new) as encoded:
                feature_dim = self._batch_check.features_of(new)
                with self._added_parts_undone_if_it_raises():
                    for source in encoded:
                        add_encoder(self.optimizer, source)
                        self._follow_trained()
                    if feature_dim is not None:
                        self._build_heads(feature_dim)
            for group in new:
                group.source.signature = describe(group.x, 1), describe(group.y, 1)
        return samples

    def _build_heads(self, feature_dim: int) -> None:
        """Make the heads that are missing, and train them; change nothing if that raises."""
        if all(task.head is not None for task in self.model.classifiers):
            self.model.feature_dim = feature_dim
            return
        with self._added_parts_undone_if_it_raises():
            for task in self.model.build_heads(feature_dim):
                add_head(self.optimizer, task)
            self._follow_trained()

    @contextmanager
    def _added_parts_undone_if_it_raises(self) -> Iterator[None]:
        """Undo what the block adds to tasks, sources, heads, optimiser and average, if it raises."""
        heads, feature_dim = {task: task.head for task in self.tasks.values()}, self.model.feature_dim
        sources = [(source, source.finished) for source in self.sources.values()]
        try:
            with groups_undone_if_it_raises(self.optimizer):
                yield
        except BaseException:
            for name in [name for name, task in self.tasks.items() if task not in heads]:
                del self.tasks[name]
            self._restore_sources(sources)
            for task, head in heads.items():
                task.head = head
            self.model.feature_dim = feature_dim
            self._follow_trained()
            raise

    def _restore_sources(self, before: Sequence[tuple[TaskSource, bool]]) -> None:
        """Let the model have the sources that it had, in memory, too."""
        known = {source.name for source, _ in before}
        for name in [name for name in self.sources if name not in known]:
            self.model.remove_source(self.sources[name])
            if self.memory is not None:
                self.memory.withdraw(name)
        for source, finished in before:
            if source.name not in self.sources:
                self.model.add_source(source)
                if self.memory is not None and source.name not in self.memory.buffers:
                    start_in_memory(self.memory, source)
            source.finished = finished

    def _new_average(self) -> WeightAverage | None:
        if self.average is None:
            return None
        return (ShardedAverage if self._engines.is_sharded else WeightAverage)(self.average)

    def _follow_trained(self) -> None:
        """Average the heads that were added; stop averaging frozen weights."""
        if self._average is not None:
            self._average.follow(map(uncompiled, self.model.modules()))


def _left_out(batches: Mapping[str, BatchLike], samples: Sequence[Samples]) -> dict[str, int]:
    """Return by how many samples the batches of sources are larger than what a step learns of them."""
    learned, given = {group.name: len(group.y) for group in samples}, dict[str, int]()
    for name, (_, y) in batches.items():
        given |= {f"{name}/{task}": len(part) for task, part in y.items()} if isinstance(y, Mapping) else {name: len(y)}
    missing = {name: count - learned.get(name, 0) for name, count in given.items()}
    return {name: count for name, count in missing.items() if count}


def _learning_rate_factor(schedule: Schedule, step: int) -> float:
    """Return the factor of the learning rates in a step."""
    factor: object = schedule(step)
    if not is_number(factor) or not 0.0 <= factor < math.inf:
        raise SpclError(f"the schedule must give a factor of at least 0, but it gives {factor!r:.80} for step {step}")
    return float(factor)
