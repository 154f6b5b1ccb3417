"""The online learner: one model, tasks that come and go, one step at a time."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import nn

from spcl.batches import BatchLike
from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.cuda_graphs import CudaGraphEngine
from spcl.engine.base import Engine
from spcl.engine.eager import EagerEngine
from spcl.engine.model import Samples, Scenario, SharedModel
from spcl.errors import SpclError, TaskError
from spcl.learner import state as states
from spcl.learner.admission import Admission, check_arguments, check_new_task, find_task
from spcl.learner.fitting import Fitting, MomentLike
from spcl.learner.optimizer import (
    MakeOptimizer,
    add_head,
    check_new_head,
    make_optimizer,
    saved_optimizer,
)
from spcl.learner.prediction import Predictor
from spcl.learner.report import StepReport
from spcl.learner.step_runner import StepRunner
from spcl.losses import Loss
from spcl.memory import Memory
from spcl.methods.base import Method
from spcl.methods.tasks import Task, classifier_task
from spcl.stability import Stability

__all__ = ["Learner"]


class Learner(Predictor):
    """Trains one shared backbone, with a head per task, on any number of sources at once.

    Args:
        backbone: any module that turns a batch of inputs into features; training happens on its device.
        method: how the tasks' gradients become one update, e.g. ``spcl.methods.SORO()``.
        optimizer: makes the optimiser from a list of parameters; by default Adam with learning rate 1e-3.
        memory: keeps samples of earlier tasks for replay; None replays nothing.
        scenario: ``"task"``: a sample's task is known when predicting, and its loss covers that task's classes;
            ``"class"``: it is not, and the loss covers the classes of every task added so far.
        memory_batch: how many samples to replay in a step; by default as many as the step's largest batch has.
        autocast: ``torch.bfloat16`` for mixed precision.
        measure_stability: report κ, conflicts and magnitude similarity also for methods that need no Gramian; every
            gradient is then kept separately.
        capture: on a GPU, capture CUDA graphs and replay them; what cannot be captured runs eagerly.
        seed: of the initialisation of heads.

    Attributes:
        model: the backbone and the heads.
        optimizer: may be replaced, and its groups changed, between steps; the last group holds the heads.
        memory, method, memory_batch, measure_stability: as given.
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
        memory: Memory | None = None,
        scenario: Scenario = "task",
        memory_batch: int | None = None,
        autocast: torch.dtype | None = None,
        measure_stability: bool = False,
        capture: bool = True,
        seed: int = 0,
    ) -> None:
        check_arguments(backbone, method, memory, memory_batch)
        super().__init__(SharedModel(backbone, scenario, method.make_head, seed, autocast, method.joint_logits))
        self.method = method
        self.memory = memory
        self.memory_batch = memory_batch
        self.measure_stability = measure_stability
        self.capture = capture
        self.seed = seed
        self.steps = 0
        self._admission = Admission(self.model, method, memory)
        graphs = capture and self.model.device.type == "cuda"
        self._use_engine((CudaGraphEngine if graphs else EagerEngine)(self.model, method))
        self.optimizer = make_optimizer(optimizer or torch.optim.Adam, self._engine.gradients.parameters)

    def _use_engine(self, engine: Engine) -> None:
        self._engine = engine
        self._runner = StepRunner(engine, self.model, self.method, self.memory)

    # -- tasks

    @property
    def active_tasks(self) -> list[str]:
        """The tasks that are not finished."""
        return [name for name, task in self.tasks.items() if not task.finished]

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
        check_new_task(self.tasks, name, classes, head, loss)
        if head is not None:
            check_new_head(self.optimizer, name, head)
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
        if self.model.feature_dim is not None:
            self._build_heads(self.model.feature_dim)

    def finish_task(self, name: str) -> None:
        """End a task: from now on it is only replayed, and memory keeps the samples that its policy selects."""
        task = find_task(self.tasks, name)
        if task.finished:
            raise TaskError(f"task {name!r} is finished already")
        if self.memory is not None:
            joint = self.scenario == "class" and task.classes is not None
            describe = lambda x: self.logits(x, None if joint else name)  # noqa: E731
            self.memory.finish(name, describe if self.method.stores_logits else None)
        task.finished = True

    def _build_heads(self, feature_dim: int) -> None:
        for task in self.model.build_heads(feature_dim):
            add_head(self.optimizer, task)

    # -- training

    def step(self, batches: Mapping[str, BatchLike], meanwhile: Callable[[], object] | None = None) -> StepReport:
        """Make one update from a batch of each of the given tasks, and from memory once it holds samples.

        A task whose loss or gradient is not finite is skipped, reported, and named in a warning after three in a row:
        the step is repeated without it, and the others train as if it had not been there. After a call that raises,
        unless it is the optimiser that was interrupted, training goes on as if it had not been made.

        Args:
            batches: (inputs, targets) of any of the running tasks, as tensors or NumPy arrays; their sizes may differ.
                Inputs may also be a dict or tuple of them with one row per sample in each, which the backbone gets as
                it is. Replayed samples of different shapes take one pass through the backbone per shape.
            meanwhile: called when a GPU's work is queued, before the host synchronises; e.g. to fetch more batches.
        """
        samples = self._admitted(batches)
        outcome, skipped = self._runner.run(
            samples,
            self.optimizer,
            memory_batch=self.memory_batch,
            measure_stability=self.measure_stability,
            meanwhile=meanwhile,
        )
        self.steps += 1
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

    def _admitted(self, batches: Mapping[str, BatchLike]) -> list[Samples]:
        samples = self._admission.check(batches)
        feature_dim = self._admission.try_first_samples([group for group in samples if group.task.signature is None])
        if feature_dim is not None:
            self._build_heads(feature_dim)
        return samples

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

        A checkpoint is saved between two moments and at the end. ``Learner.load(checkpoint, …, stream=stream)``, where
        the stream has a state, and ``fit`` with the same arguments continue exactly.

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

        One safetensors file, without pickle, checksummed, replaced atomically; the previous one stays beside it.

        Args:
            path: the file.
            sources: streams, schedules and whatever else has ``state_dict()``, saved under these names.
        """
        parameters = inspect.signature(type(self).load).parameters.values()
        reserved = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
        for name in sources:
            if name in reserved:
                raise SpclError(f"a source cannot be saved as {name!r}, because load({name}=…) is the learner's own")
        write_checkpoint(path, self._state() | {"sources": {k: v.state_dict() for k, v in sources.items()}})

    def model_state(self) -> dict[str, Any]:
        """Return the model as plain data and tensors: backbone, tasks with their heads, and method.

        :meth:`load` makes a learner of it that predicts the same; its optimiser is new and its memory empty.
        """
        return {"learner": self._settings()} | states.model_state(self._parts())

    def _state(self) -> dict[str, Any]:
        return {"learner": self._settings()} | states.parts_state(self._parts())

    def _settings(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "memory_batch": self.memory_batch,
            "autocast": self.model.autocast is not None,
            "measure_stability": self.measure_stability,
            "capture": self.capture,
            "seed": self.seed,
            "steps": self.steps,
            "feature_dim": self.model.feature_dim,
        }

    def _parts(self) -> states.Parts:
        return states.Parts(self.model, self.optimizer, self.method, self.memory)

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
        heads: states.Heads | None = None,
        losses: states.Losses | None = None,
        **sources: states.Stateful,
    ) -> Self:
        """Return the learner as it was saved, and restore the random number generators.

        The backbone is changed only when all of the checkpoint fits.

        Args:
            checkpoint: the file, its content as of :func:`spcl.checkpoint.read_checkpoint`, or a :meth:`model_state`.
            backbone: a module of the same architecture, which gets the saved weights.
            method, optimizer, memory: needed only if not of ``spcl.methods``, ``torch.optim`` and ``spcl.memory``.
            heads: head and loss of every task that was added with its own, by name.
            losses: the loss of every classifier that was added with one other than a ``CrossEntropy``, by name.
            sources: what was saved along, each restored by its ``load_state_dict``. A schedule needs the loaded
                learner's optimiser: make it afterwards and pass it ``read_checkpoint(path)["sources"][name]``.
        """
        state = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
        states.check_state(state, backbone, sources)
        settings = state["learner"]
        learner = cls(
            backbone,
            states.saved_method(state["method"], method),
            optimizer=optimizer or (saved_optimizer(state["optimizer"]) if "optimizer" in state else None),
            memory=states.saved_memory(state.get("memory")) if memory is None else memory,
            autocast=torch.bfloat16 if settings["autocast"] else None,
            **{name: settings[name] for name in ("scenario", "memory_batch", "measure_stability", "capture", "seed")},
        )
        learner.steps = settings["steps"]
        states.restore_parts(learner._parts(), state, heads or {}, losses or {}, sources)
        return learner
