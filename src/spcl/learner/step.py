"""One step: Algorithm 2 of the paper as a transaction, from the batches of the tasks to new weights, or nothing."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl.batches import Inputs
from spcl.engine.base import Engine, Rule
from spcl.engine.model import Samples, SharedModel, StepBatch, with_inputs
from spcl.engine.rows import ReductionPlan
from spcl.engine.segments import UnsupportedError
from spcl.engine.update import Update
from spcl.errors import SpclError, TaskError, is_out_of_memory
from spcl.learner.parameters import frozen_normalisations
from spcl.memory import Memory, ReplayBatch
from spcl.memory.base import draw_ahead
from spcl.methods.base import MEMORY, Gradients, Method, Weights
from spcl.stability import Stability
from spcl.transforms import Transform

Array = NDArray[np.float64]

WARN_AFTER = 3


@dataclass(frozen=True)
class StepReport:
    """Result of one :meth:`Learner.step`; stability measures are computed on access, from T×T matrices.

    Attributes:
        step: the number of the step, from 0.
        losses: the loss of every gradient (task, or ``"memory"``) that took part.
        weights: the weight of every gradient in the update; empty where the method is not a weighting.
        before: stability of the gradients; None when the method needed no Gramian and none was asked for.
        after: stability of the adjusted gradients.
        skipped: the gradients that were skipped, and why.
        seconds: the time of every phase (on a GPU: until its work was launched); ``capture``, where CUDA graphs were
            captured in this step, is part of the others.
        memory_bytes: the size of the memory's content.
    """

    step: int
    losses: dict[str, float]
    weights: dict[str, float]
    before: Stability | None
    after: Stability | None
    skipped: dict[str, str]
    seconds: dict[str, float]
    memory_bytes: int


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        memory_batch: the number of samples to replay, or None for as many as the largest batch has.
        measure_stability: keep every gradient separately, so that their stability can be measured.
        augment: transforms the inputs before they enter the network, or None.
        updates: the number of updates.
    """

    memory_batch: int | None
    measure_stability: bool
    augment: Transform | None
    updates: int


class Phases:
    """The times of phases, one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name = ""
        self._begin = 0.0

    def __call__(self, name: str) -> "Phases":
        """Return the context of a phase."""
        self._name = name
        return self

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + perf_counter() - self._begin


@dataclass
class Result:
    """Result of an attempt at an update.

    With ``faults`` there is no update: the attempt must be undone, and is repeated without the faulty gradients. If
    batches shared a pass, separate passes must show which of them is faulty.

    Attributes:
        skipped: the gradients that earlier attempts found faulty, and why.
        apart: whether every batch takes a pass of its own.
        is_last: whether this is the last update of the step, which shows the samples to memory.
        phase: counts the time of phases.
    """

    skipped: dict[str, str] = field(default_factory=dict)
    apart: bool = False
    is_last: bool = False
    phase: Phases = field(default_factory=Phases)
    losses: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    before: Tensor | None = None
    after: Tensor | None = None
    faults: dict[str, str] = field(default_factory=dict)
    is_joint: bool = False
    logits: dict[str, Tensor] = field(default_factory=dict)
    edits: list[tuple[ReplayBatch, Inputs]] = field(default_factory=list)

    def again(self) -> "Result":
        """Return the result of another attempt: by separate passes, or without the gradients that are faulty."""
        skipped = self.skipped if self.is_joint else self.skipped | self.faults
        return Result(skipped, apart=self.is_joint, is_last=self.is_last, phase=self.phase)


class Step:
    """Makes steps: every update is computed, checked and applied, or undone.

    ::

        run                       for each update of a step:
            attempt               until all gradients that take part are healthy:
                backward              gradients of tasks, heads and memory    (Algorithm 2, lines 3, 4, 7)
                penalty_gradient      orthogonality gradient                  (line 5)
                gramian               Gramian and health of the gradients     (line 8)
                store                 memory gets the new samples, while a GPU computes
                find_faults           undo and repeat without what is not finite
                weigh                 weights of the gradients                (line 9)
                combine               update of the backbone                  (line 10)
            update                optimiser, average of the weights           (lines 6 and 11)

    Args:
        engine: computes gradients and updates.
        model: the shared model.
        method: how gradients become an update.
        memory: of earlier samples, or None.

    Attributes:
        draws_ahead: whether the samples that the next update replays are drawn while a device computes this one.
    """

    def __init__(self, engine: Engine, model: SharedModel, method: Method, memory: Memory | None) -> None:
        self._engine = engine
        self._model = model
        self._method = method
        self._is_penalty_coupled = method.settings.coupled
        self._memory = memory
        self._before = Before(engine, method, memory, model.device)
        self._frozen_normalisations = frozen_normalisations(model.backbone)
        self.draws_ahead = model.device.type != "cpu" and vars(type(memory)).get("draws_ahead", False)
        self.keep_statistics()

    def run(
        self,
        samples: Sequence[Samples],
        update: Update,
        options: StepOptions,
        meanwhile: Callable[[], object] | None = None,
    ) -> tuple[Result, dict[str, str]]:
        """Make the updates of a step; return the result of the first one, and why gradients were skipped in any.

        A task that is skipped takes no part in the further updates of the step. An update that raises is undone; those
        before it remain. ``meanwhile`` is called once, while a device computes.
        """
        captured = self._engine.capture_seconds
        if not self._model.backbone.training:
            self._model.backbone.train()
        self.keep_statistics()
        results: list[Result] = []
        skipped: dict[str, str] = {}
        trained: Sequence[Samples] = samples
        while trained and len(results) < options.updates:
            result = Result(is_last=len(results) == options.updates - 1)
            self._before.save()
            try:
                while trained:
                    try:
                        self._attempt(result, trained, options, None if results else meanwhile)
                    except UnsupportedError as error:  # the batches cannot share a pass
                        if result.apart:
                            raise
                        result.is_joint, result.faults = True, {MEMORY: str(error)}
                    if not result.faults:
                        break
                    result = result.again()
                    self._undo(update, draws=MEMORY not in result.skipped)  # a faulty memory draws other samples
                    trained = [group for group in trained if group.task.name not in result.skipped]
                if result.losses:
                    with result.phase("update"):
                        self._method.after_step(result.losses)
                        self._engine.update(update)
            except BaseException:
                self._undo(update)
                raise
            finally:
                self._before.end()
            results.append(result)
            skipped = result.skipped | skipped
            trained = [group for group in samples if group.task.name not in skipped]
        first, *others = results
        seconds = first.phase.seconds
        for phase, count in ((phase, count) for other in others for phase, count in other.phase.seconds.items()):
            seconds[phase] = seconds.get(phase, 0.0) + count
        if self._engine.capture_seconds > captured:
            seconds["capture"] = self._engine.capture_seconds - captured
        _count_skipped(samples, skipped)
        return first, skipped

    def errors(self, samples: Sequence[Samples], update: Update, options: StepOptions) -> dict[str, TaskError]:
        """Return the errors that computing an update from each batch alone raises, by task; every update is undone."""
        raised: dict[str, TaskError] = {}
        for group in samples:
            self._before.save()
            try:
                self._attempt(Result(apart=True), [group], options, None)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                if not isinstance(error, TaskError):
                    error = TaskError(f"task {group.task.name!r}: {type(error).__name__}: {error}")
                raised[group.task.name] = error
            finally:
                self._undo(update)
                self._before.end()
        return raised

    def keep_statistics(self) -> None:
        """Put frozen normalisation layers into evaluation mode: what a frozen part computes must not drift."""
        for layer in self._frozen_normalisations:
            if layer.training:
                layer.eval()

    def _attempt(
        self,
        result: Result,
        batches: Sequence[Samples],
        options: StepOptions,
        meanwhile: Callable[[], object] | None,
    ) -> None:
        """Compute the update from the tasks' batches and from memory: Algorithm 2, lines 3 to 10."""
        engine, method, edits = self._engine, self._method, self._method.edits_memory
        replayed = 0 if MEMORY in result.skipped else self._number_to_replay(batches, options)
        known = self._known_gradients(batches, replayed)
        plan = self._plan(known, options.measure_stability)
        engine.begin(plan)
        with result.phase("memory"):
            draws = range(method.draws if replayed else 0)
            replays = [] if edits else [StepBatch(len(batches), self._drawn(replayed), draw) for draw in draws]
        with result.phase("tasks"):  # lines 3, 4 and 7: g_i, the gradient of head i, and memory's gradient
            tasks = [StepBatch(index, [group]) for index, group in enumerate(batches)]
            passes = engine.backward([*tasks, *replays], options.augment, apart=result.apart)
        result.logits, result.is_joint, fault = passes
        with result.phase("memory"):
            for draw in draws if edits else ():
                fault = fault or self._backward_edited(result, replayed, StepBatch(len(batches), [], draw), options)
        if fault is not None:
            result.faults[MEMORY] = fault
        if method.settings.alpha > 0.0 and engine.gradients.length:
            with result.phase("orthogonality"):
                engine.penalty_gradient()  # line 5: α ∇ℓ_orth, the same for every task
        with result.phase("weighting"):
            needed = plan.is_separate or (method.reduction == "mean" and method.uses_gramian)
            wait = engine.gramian(needed and engine.gradients.length > 0)  # line 8: GᵀG
        if meanwhile is not None:
            meanwhile()
        with result.phase("memory"):  # while a device computes
            self._store(result, batches)
            self._draw_ahead(replayed)
        with result.phase("weighting"):
            gramian, health = wait()
            self._check_health(result, gramian, health)
            if not result.faults and engine.gradients.length:  # else the backbone is frozen
                rule = self._weigh(result, gramian, known)  # line 9: Ĝ = G M, as the weights of G's columns
                bounds = _row_norms(plan, gramian, health)
                if not engine.combine(rule, check=not self._is_surely_finite(rule, bounds)):  # line 10: the update Ĝ W
                    reason = f"the update that {method!r} gives for this step is not finite"
                    result.faults = {name: reason for name in result.losses if name != MEMORY}

    # -- what is known before the gradients are

    def _number_to_replay(self, batches: Sequence[Samples], options: StepOptions) -> int:
        """Return the number of samples to replay: by default as the largest batch has, and 0 while memory has none."""
        if self._memory is None or not len(self._memory):
            return 0
        return options.memory_batch or max(group.y.shape[0] for group in batches)

    def _known_gradients(self, batches: Sequence[Samples], replayed: int) -> Gradients:
        """Return what is known of the step's gradients before they are computed."""
        parts = [(group.task.name, group.task.classes or 1, group.y.shape[0]) for group in batches]
        tasks = []
        if replayed and self._memory is not None:
            tasks = [self._model.tasks[name] for name in self._memory.replayable_tasks()]
            parts.append((MEMORY, sum(task.classes or 1 for task in tasks), replayed))
        names, classes, samples = zip(*parts, strict=True)
        losses = np.array([np.nan] * len(names))
        return Gradients(names, losses, None, classes, samples, tuple(task.name for task in tasks))

    def _plan(self, known: Gradients, separate: bool) -> ReductionPlan:
        """Plan the reduction of the step's gradients; the weights of a ``"sum"`` are computed first, from the names."""
        weights: list[float] = []
        if self._method.reduction == "sum":
            weights = self._method_weights(known).values.tolist()
        return ReductionPlan.make(known.names, self._method.reduction, separate=separate, weights=weights)

    # -- memory

    def _drawn(self, count: int) -> list[Samples]:
        """Draw a replay batch."""
        assert self._memory is not None
        tasks = self._model.tasks
        drawn = self._memory.draw(count)
        return [Samples(tasks[part.task], part.x, part.y, part.logits, replayed=True) for part in drawn]

    def _backward_edited(self, result: Result, count: int, batch: StepBatch, options: StepOptions) -> str | None:
        """Draw a replay batch, let the method edit it along the tasks' gradients, and add its gradient to memory's.

        Return why the model could not be trained on it, or None.
        """
        assert self._memory is not None
        drawn = self._memory.draw(count)
        tasks = self._model.tasks
        samples = [Samples(tasks[part.task], part.x, part.y, part.logits, replayed=True) for part in drawn]
        model = _LookAhead(self._model, self._method, samples, self._engine.mean_of_tasks())
        try:
            inputs: list[Inputs] = [*self._method.edit(drawn, model)]
        except (RuntimeError, ValueError) as error:
            if isinstance(error, SpclError) or is_out_of_memory(error):
                raise
            return f"the model raised an error on the replay batch: {error}"
        result.edits += zip(drawn, inputs, strict=True)
        batch = replace(batch, samples=with_inputs(samples, inputs))
        return self._engine.backward([batch], options.augment, apart=True).memory_fault

    def _store(self, result: Result, batches: Sequence[Samples]) -> None:
        """Give memory the edited and, in the last update, the new samples; it forgets them if the update is undone."""
        if self._memory is None:
            return
        for batch, x in result.edits:
            self._memory.replace(batch, x)
        for group in batches if result.is_last else ():
            self._memory.observe(group.task.name, group.x, group.y, result.logits.get(group.task.name))

    def _draw_ahead(self, replayed: int) -> None:
        """Draw the samples that the next update replays if it replays as many, while a device computes this one."""
        if self.draws_ahead and self._memory is not None and replayed:
            for _ in range(self._method.draws):
                draw_ahead(self._memory, replayed)

    # -- health

    def _check_health(self, result: Result, gramian: Array | None, health: Array) -> None:
        """Note the losses, and the gradients that are faulty."""
        gradients = self._engine.gradients
        computed = [name for name in gradients.plan.names if name not in result.faults]
        result.losses = dict(zip(computed, health[:, 0].tolist(), strict=False))
        norms: Array | None = None
        if gramian is not None and gradients.plan.is_separate:
            norms = row_norms(gramian.diagonal()[: len(health)], torch.finfo(gradients.dtype).max)
            health[:, 1] += norms
        faults = find_faults(computed, health[: len(computed)], self._before.buffers_were_finite)
        if faults and result.is_joint and norms is not None:
            own = np.stack([health[:, 0], norms, np.zeros(len(health))], axis=1)  # no other gradient has a part in it
            if found := find_faults(computed, own, self._before.buffers_were_finite):
                result.faults, result.is_joint = found, False
                return
        result.faults |= faults

    def _is_surely_finite(self, rule: Rule, norms: Array) -> bool:
        """Return whether Σ|w_i|·‖g_i‖ shows that the update is finite, without computing its norm."""
        is_penalty_added = self._method.settings.alpha > 0.0 and not self._is_penalty_coupled
        if callable(rule) or is_penalty_added or len(norms) < len(rule):  # the norm of the penalty is not known
            return False
        sizes = [abs(weight) for weight in rule.tolist()]
        bound = sum(size * norm for size, norm in zip(sizes, norms.tolist(), strict=False))
        largest = torch.finfo(self._engine.gradients.dtype).max
        return bound < largest and all(size < largest for size in sizes)

    # -- weights

    def _weigh(self, result: Result, gramian: Array | None, known: Gradients) -> Rule:
        """Return the weight of every row in the update, or the method's own rule if it is not a weighted sum."""
        gradients, plan, method = self._engine.gradients, self._engine.gradients.plan, self._method
        mixing = gradients.penalty_matrix(self._is_penalty_coupled)
        before = gramian if gramian is None or mixing is None else mixing @ gramian @ mixing.T
        if plan.is_separate:
            result.before = torch.from_numpy(before)
        if method.elementwise:
            return self._method_update
        weights = self._reduced_weights(plan, result.losses, before, known)
        values = weights.values.detach().to("cpu", torch.float64).numpy()
        per_gradient = plan.matrix.T @ values
        result.weights = dict(zip(plan.names, per_gradient.tolist(), strict=True))
        if result.before is not None:
            adjusted = weights if method.reduction == "none" else Weights(torch.from_numpy(per_gradient))
            result.after = adjusted.adjusted_gramian(result.before).detach()
        per_row: Array = plan.reduction.T @ values
        return per_row if mixing is None else mixing.T @ per_row

    def _reduced_weights(
        self, plan: ReductionPlan, losses: dict[str, float], rows: Array | None, known: Gradients
    ) -> Weights:
        """Return the method's weights of the reduced gradients, given the Gramian of the rows."""
        if self._method.reduction == "sum":
            return Weights(torch.ones(1, dtype=torch.float64))
        each = np.array([losses[name] for name in plan.names])
        if self._method.reduction == "mean":
            rows = None if rows is None else plan.reduction @ rows @ plan.reduction.T
            counts = (plan.matrix > 0.0) @ np.array([known.classes, known.samples]).T
            classes, samples = (tuple(numbers.tolist()) for numbers in counts.T)
            known = replace(known, names=plan.reduced_names, classes=classes, samples=samples)
            each = plan.matrix @ each
        gramian = None if rows is None else torch.from_numpy(rows)
        return self._method_weights(replace(known, losses=each, gramian=gramian))

    def _method_weights(self, gradients: Gradients) -> Weights:
        weights = self._method.weigh(gradients)
        found = _shape(weights.values) if isinstance(weights, Weights) else type(weights).__name__
        if found != (len(gradients.names),):
            raise SpclError(
                f"{self._method!r} must give Weights of a tensor of shape ({len(gradients.names)},) for the gradients "
                f"of {', '.join(gradients.names)}, but gives {found}"
            )
        return weights

    def _method_update(self, gradients: Tensor) -> Tensor:
        update = self._method.combine(gradients)
        found, expected = _shape(update), tuple(gradients.shape[1:])
        if found != expected:
            raise SpclError(f"combine of {self._method!r} must give a tensor of shape {expected}, but gives {found}")
        return update

    # -- undoing

    def _undo(self, update: Update, draws: bool = True) -> None:
        self._before.restore(draws)
        update.optimizer.zero_grad(set_to_none=True)


class Before:
    """The state that an update changes before it is known to be finite.

    It consists of the buffers of backbone and heads (batch-norm's running averages), the random number generators of
    dropout, the draws and the samples of memory, and the state of the method.
    """

    def __init__(self, engine: Engine, method: Method, memory: Memory | None, device: torch.device) -> None:
        self._engine = engine
        self._method = method
        self._memory = memory
        self._cuda_generator = _cuda_generator(device)

    def save(self) -> None:
        """Save the state before an update."""
        self._buffers = self._engine.snapshot()
        self._random = torch.get_rng_state()
        self._cuda_offset = 0 if self._cuda_generator is None else self._cuda_generator.get_offset()
        if self._memory is not None:
            self._memory.begin()
        self._method_state = self._method.state_dict()

    def restore(self, draws: bool = True) -> None:
        """Restore the saved state, or all of it but the draws of memory."""
        self._buffers.restore()
        torch.set_rng_state(self._random)
        if self._cuda_generator is not None:
            self._cuda_generator.set_offset(self._cuda_offset)
        if self._memory is not None:
            self._memory.rollback(draws)
        self._method.load_state_dict(self._method_state)

    def end(self) -> None:
        """End the update: what memory has stored stays."""
        if self._memory is not None:
            self._memory.commit()

    def buffers_were_finite(self) -> bool:
        """Return whether the model's buffers were finite before the update."""
        return self._buffers.was_finite()


def _cuda_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator of dropout on a GPU; within a step only its offset changes."""
    if device.type != "cuda":
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def find_faults(names: Sequence[str], health: Array, buffers_were_finite: Callable[[], bool]) -> dict[str, str]:
    """Return the gradients that are faulty, each with the reason.

    A gradient's health is its loss, its norm and the norm of the model's buffers after its forward pass; any non-finite
    value marks it as faulty. Gradients after a faulty one may be affected by it: unless their own loss is not finite,
    they are judged when the step is repeated.

    Args:
        names: of the gradients, tasks before memory.
        health: one row of three numbers per gradient.
        buffers_were_finite: whether the buffers' norm was finite before the step.

    >>> find_faults(["a", "b"], np.array([[0.5, 1.0, 1.0], [np.nan, 1.0, 1.0]]), lambda: True)
    {'b': 'its loss is nan'}
    """
    faults: dict[str, str] = {}
    if np.isfinite(health).all():
        return faults
    for name, (loss, norm, buffers) in zip(names, health.tolist(), strict=True):
        if faults and (name == MEMORY or isfinite(loss)):
            continue
        if not isfinite(loss):
            faults[name] = f"its loss is {loss}"
        elif not isfinite(norm):
            faults[name] = f"its gradient is not finite, or too large to be squared (loss {loss:g})"
        elif not isfinite(buffers) and buffers_were_finite():
            faults[name] = f"the model's running averages overflow on its inputs (loss {loss:g})"
    return faults


def row_norms(squares: Array, largest: float) -> Array:
    """Return the norms of gradients, given their squares.

    Squares above ``largest`` count as infinite: an optimiser that squares such a gradient overflows.

    >>> row_norms(np.array([4.0, 1e39]), largest=3e38)
    array([ 2., inf])
    """
    return np.array([sqrt(abs(square)) if square < largest else inf for square in squares.tolist()])


def _row_norms(plan: ReductionPlan, gramian: Array | None, health: Array) -> Array:
    """Return the norms of the rows of the gradient matrix, or bounds of them from the norms of the gradients."""
    if gramian is not None:
        return np.sqrt(gramian.diagonal())
    norms: Array = health[:, 1]
    bounds: Array = np.maximum(np.abs(plan.accumulation) @ norms, norms.max())
    return bounds


def _shape(value: object) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or the name of another type."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _count_skipped(samples: Sequence[Samples], skipped: Mapping[str, str]) -> None:
    """Count the steps in which tasks were skipped, and warn where that happens repeatedly."""
    if MEMORY in skipped:
        warnings.warn(f"memory was skipped in a step: {skipped[MEMORY]}", RuntimeWarning, stacklevel=4)
    for task in (group.task for group in samples):
        if task.name not in skipped:
            task.skipped_in_a_row = 0
            continue
        task.skipped += 1
        task.skipped_in_a_row += 1
        if task.skipped_in_a_row == WARN_AFTER:
            warnings.warn(
                f"task {task.name!r} was skipped in {WARN_AFTER} steps in a row: {skipped[task.name]}; "
                f"check its data and the learning rate",
                RuntimeWarning,
                stacklevel=4,
            )


class _LookAhead:
    """Implements :class:`spcl.methods.base.LookAhead` for the samples of one draw."""

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        samples: Sequence[Samples],
        direction: Mapping[nn.Parameter, Tensor],
    ) -> None:
        self._model = model
        self._method = method
        self._samples = samples
        self._direction = direction

    def loss(self, inputs: Sequence[Inputs]) -> Tensor:
        with self._model.evaluating():
            outputs = self._model.outputs(self._samples, inputs)
        return torch.stack([self._method.task_loss(output) * len(output.targets) for output in outputs]).sum()

    @contextmanager
    def ahead(self, rate: float) -> Iterator[None]:
        before = {parameter: parameter.detach().clone() for parameter in self._direction}
        with torch.no_grad():
            for parameter, change in self._direction.items():
                parameter.sub_(change, alpha=rate)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in before.items():
                    parameter.copy_(value)
