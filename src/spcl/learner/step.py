"""One update of the paper's Algorithm 2, from the batches of the tasks to the update in the parameters' ``.grad``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs
from spcl.engine.base import Engine, JointPassError
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples
from spcl.engine.reduction import ReductionPlan
from spcl.errors import SpclError, is_out_of_memory
from spcl.learner.health import find_faults, row_norms
from spcl.learner.replay import Replay, with_inputs
from spcl.learner.rollback import Rollback
from spcl.memory import ReplayBatch
from spcl.methods.base import MEMORY, Gradients, Method, Weights
from spcl.transforms import Transform

__all__ = ["Meanwhile", "Outcome", "Step", "StepOptions"]

Array = NDArray[np.float64]
Meanwhile = Callable[[], object]


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        memory_batch: the number of samples to replay, or None for as many as the largest batch has.
        measure_stability: keep every gradient separately, so that their stability can be measured.
        augment: transforms the inputs before they enter the network, or None.
        updates: the number of updates.
        separate_passes: compute every gradient by a pass of its own.
    """

    memory_batch: int | None
    measure_stability: bool
    augment: Transform | None
    updates: int
    separate_passes: bool = False


@dataclass
class Outcome:
    """Outcome of a step's computation.

    Without ``faults`` the update is in the ``.grad`` of backbone and heads. With them there is none: the step must be
    undone, and may be repeated without the faulty gradients. If ``is_joint``, batches shared a pass, and which of them
    is faulty, separate passes must show.
    """

    losses: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    before: Tensor | None = None
    after: Tensor | None = None
    faults: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    edits: list[tuple[ReplayBatch, Inputs]] = field(default_factory=list)
    is_joint: bool = False

    def timed(self, phase: str) -> "_Timed":
        """Add the time of the block to that of the phase."""
        return _Timed(self.seconds, phase)


class _Timed:
    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds = seconds
        self._phase = phase

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + perf_counter() - self._begin


class Step:
    """Computes the update of a step."""

    def __init__(self, engine: Engine, method: Method, replay: Replay, rollback: Rollback) -> None:
        self._engine = engine
        self._method = method
        self._replay = replay
        self._rollback = rollback

    @property
    def _gradients(self) -> GradientMatrix:
        return self._engine.gradients

    def compute_update(
        self, outcome: Outcome, batches: Sequence[Samples], replayed: int, options: StepOptions, meanwhile: Meanwhile
    ) -> None:
        """Compute the update from the tasks' batches and ``replayed`` samples of memory: Algorithm 2, lines 3 to 10.

        What the step computes goes to the outcome. When the GPU's work is queued, ``meanwhile`` is called, before the
        host synchronises.
        """
        try:
            self._compute_update(outcome, batches, replayed, options, meanwhile)
        except JointPassError as error:
            outcome.is_joint = True
            outcome.faults = {group.task.name: str(error) for group in batches}

    def _compute_update(
        self, outcome: Outcome, batches: Sequence[Samples], replayed: int, options: StepOptions, meanwhile: Meanwhile
    ) -> None:
        engine, alpha = self._engine, self._method.settings.alpha
        known = self._known_gradients(batches, replayed)
        engine.begin(self._plan(known, options.measure_stability))
        with outcome.timed("tasks"):
            batches = self._augmented(batches, options)
        replays: list[list[Samples]] = []
        if replayed and engine.joins_batches and not self._method.edits_memory:
            with outcome.timed("memory"):
                replays = [self._drawn(outcome, replayed, options) for _ in range(self._method.draws)]
        with outcome.timed("tasks"):  # lines 3, 4 and 7: g_i, and the gradient of head i
            self._backward(outcome, batches, replays, options.separate_passes)
        if replayed and not (outcome.is_joint and replays):
            with outcome.timed("memory"):
                self._backward_replay(outcome, replays, replayed, options)
        if alpha > 0.0 and self._gradients.length:
            with outcome.timed("orthogonality"):
                engine.penalty_gradient()  # line 5: α ∇ℓ_orth, the same for every task
        needed = self._needs_gramian()
        with outcome.timed("weighting"):
            engine.start_gramian(needed)
        meanwhile()
        with outcome.timed("weighting"):
            gramian, health = engine.gramian(needed)  # the only host–device synchronisation
            self._check_health(outcome, gramian, health)
            if not outcome.faults and self._gradients.length:
                weights = self._weigh(outcome, gramian, known)  # line 9: Ĝ = G M, as the weights of G's columns
                self._combine(outcome, weights, self._row_norms(gramian, health))  # line 10: the update Ĝ W
        if not outcome.faults:
            engine.assign_grads()  # lines 6 and 10: the optimiser's step follows

    def _known_gradients(self, batches: Sequence[Samples], replayed: int) -> Gradients:
        """Return what is known of the step's gradients before they are computed."""
        tasks = self._replay.tasks() if replayed else []
        parts = [(group.task.name, group.task.classes or 1, group.y.shape[0]) for group in batches]
        if replayed:
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

    def _backward(
        self, outcome: Outcome, batches: Sequence[Samples], replays: Sequence[Sequence[Samples]], separately: bool
    ) -> None:
        """Compute the gradients of the tasks, and of memory with them where batches can share a pass."""
        joint = None if separately else self._engine.backward_jointly(batches, replays)
        outcome.is_joint = joint is not None
        outcome.logits = self._engine.backward(batches) if joint is None else joint

    def _backward_replay(
        self, outcome: Outcome, replays: Sequence[Sequence[Samples]], count: int, options: StepOptions
    ) -> None:
        """Add the gradients of the replay batches; a batch on which the model raises marks memory as faulty.

        A head with batch-norm, for example, cannot be trained on a single sample; the next step draws others.
        """
        try:
            for draw in range(self._method.draws):
                samples = replays[draw] if replays else self._drawn(outcome, count, options)
                self._engine.backward_replay(samples, [group.x for group in samples], draw)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, SpclError) or is_out_of_memory(error):
                raise
            outcome.faults[MEMORY] = f"the model raised an error on the replay batch: {error}"

    def _drawn(self, outcome: Outcome, count: int, options: StepOptions) -> list[Samples]:
        """Draw samples from memory; a method that edits them does so along the tasks' gradients."""
        drawn = self._replay.draw(count, self._engine)
        outcome.edits += drawn.edits
        return self._augmented(drawn.samples, options)

    def _augmented(self, samples: Sequence[Samples], options: StepOptions) -> list[Samples]:
        if options.augment is None:
            return list(samples)
        return with_inputs(samples, self._engine.augment(options.augment, [group.x for group in samples]))

    def _needs_gramian(self) -> bool:
        if not self._gradients.length:  # a frozen backbone: there is nothing to weigh
            return False
        return self._gradients.plan.is_separate or (self._method.reduction == "mean" and self._method.uses_gramian)

    def _check_health(self, outcome: Outcome, gramian: Array | None, health: Array) -> None:
        """Note the losses, and the gradients that are faulty."""
        plan = self._gradients.plan
        computed = [name for name in plan.names if name not in outcome.faults]
        outcome.losses = dict(zip(computed, health[:, 0].tolist(), strict=False))
        norms: Array | None = None
        if gramian is not None and plan.is_separate:
            norms = row_norms(gramian.diagonal()[: len(health)], torch.finfo(self._gradients.dtype).max)
            health[:, 1] += norms
        faults = find_faults(computed, health[: len(computed)], self._rollback.buffers_were_finite)
        if faults and outcome.is_joint and norms is not None:
            own = np.stack([health[:, 0], norms, np.zeros(len(health))], axis=1)  # no other gradient has a part in it
            if found := find_faults(computed, own, self._rollback.buffers_were_finite):
                outcome.faults, outcome.is_joint = found, False
                return
        outcome.faults |= faults

    def _weigh(self, outcome: Outcome, gramian: Array | None, known: Gradients) -> Array | None:
        """Return the weight of every row in the update; None for a method that combines the gradients itself."""
        plan = self._gradients.plan
        mixing = self._gradients.penalty_matrix(self._method.settings.coupled)
        before = gramian if gramian is None or mixing is None else mixing @ gramian @ mixing.T
        if plan.is_separate:
            outcome.before = torch.from_numpy(before)
        if self._method.elementwise:
            return None
        weights = self._reduced_weights(plan, outcome.losses, before, known)
        values = weights.values.detach().to("cpu", torch.float64).numpy()
        per_gradient = plan.matrix.T @ values
        outcome.weights = dict(zip(plan.names, per_gradient.tolist(), strict=True))
        if outcome.before is not None:
            adjusted = weights if self._method.reduction == "none" else Weights(torch.from_numpy(per_gradient))
            outcome.after = adjusted.adjusted_gramian(outcome.before).detach()
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

    def _combine(self, outcome: Outcome, weights: Array | None, norms: Array) -> None:
        """Combine the rows in row 0; if the result is not finite, all tasks are faulty."""
        settings = self._method.settings
        if weights is None:
            self._engine.apply(self._method_update, settings.coupled)
        else:
            self._engine.combine(weights)
        if self._gradients.has_penalty and not settings.coupled:
            self._engine.add_penalty(settings.alpha if settings.adaptive else None)
        if not self._is_surely_finite(weights, norms) and not self._engine.is_update_finite():
            reason = f"the update that {self._method!r} gives for this step is not finite"
            outcome.faults = {name: reason for name in outcome.losses if name != MEMORY}

    def _row_norms(self, gramian: Array | None, health: Array) -> Array:
        """Return the norms of the rows of the gradient matrix, or bounds of them from the norms of the gradients."""
        if gramian is not None:
            return np.sqrt(gramian.diagonal())
        norms: Array = health[:, 1]
        bounds: Array = np.maximum(np.abs(self._gradients.plan.accumulation) @ norms, norms.max())
        return bounds

    def _is_surely_finite(self, weights: Array | None, norms: Array) -> bool:
        """Return whether Σ|w_i|·‖g_i‖ shows that the update is finite, without computing its norm."""
        is_penalty_added = self._gradients.has_penalty and not self._method.settings.coupled
        if weights is None or is_penalty_added or len(norms) < len(weights):  # the norm of its gradient is not known
            return False
        sizes = [abs(weight) for weight in weights.tolist()]
        bound = sum(size * norm for size, norm in zip(sizes, norms.tolist(), strict=False))
        largest = torch.finfo(self._gradients.dtype).max
        return bound < largest and all(size < largest for size in sizes)


def _shape(value: object) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or the name of another type."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
