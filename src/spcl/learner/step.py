"""One step: Algorithm 2 of the paper as a transaction, from the sources' batches to new weights, or nothing."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from spcl.batches import Inputs
from spcl.engine.base import Engine, Passes, Rule
from spcl.engine.eager import augmented
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

LOSS, NORM, BUFFERS = range(3)
"""The columns of the health of gradients: loss, norm of the gradient, norm of the model's buffers after its pass."""


@dataclass(frozen=True)
class StepReport:
    """Result of one :meth:`Learner.step`; stability measures are computed on access, from T×T matrices.

    Attributes:
        step: the number of the step, from 0.
        losses: the loss of every gradient (source, or ``"memory"``) that took part.
        weights: the weight of every gradient in the update; empty if the method does not weigh gradients.
        before: stability of the gradients, to which a coupled penalty's gradient was added; None if the method's
            reduction is ``"mean"`` or ``"sum"`` and the learner does not ``measure_stability``.
        after: stability of the adjusted gradients; None if ``before`` is, or if the method does not weigh gradients.
        skipped: the gradients that were skipped, and why.
        seconds: seconds per phase (on a GPU: until the work was launched). ``capture``, the time spent capturing CUDA
            graphs, is contained in the other phases.
        memory_bytes: the size of the memory's content.
        unlabelled: the number of samples without a label (−100, or NaN), by source; they were left out.
    """

    step: int
    losses: dict[str, float]
    weights: dict[str, float]
    before: Stability | None
    after: Stability | None
    skipped: dict[str, str]
    seconds: dict[str, float]
    memory_bytes: int
    unlabelled: dict[str, int] = field(default_factory=dict)


class StepOptions(Protocol):
    """The options of a step, which are attributes of a learner.

    Attributes:
        memory_batch: the number of samples to replay, or None for the size of the largest batch.
        measure_stability: keep every gradient separately, so that their stability can be measured.
        augment: transforms the inputs before they enter the network, or None.
        updates: the number of updates.
    """

    memory_batch: int | None
    measure_stability: bool
    augment: Transform | None
    updates: int


@dataclass(frozen=True)
class Result:
    """Result of an update: the fields of a :class:`StepReport`, with Gramians for stabilities, and its batches."""

    losses: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    before: Tensor | None = None
    after: Tensor | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    batches: Sequence[StepBatch] = ()


class Computed(NamedTuple):
    """How the gradients of an attempt were computed; the engine holds them.

    Attributes:
        passes: what the passes over the batches found.
        batches: the batches of sources, then replay batches.
        edits: replay batches from memory, and the inputs that replace theirs.
    """

    passes: Passes
    batches: list[StepBatch]
    edits: list[tuple[ReplayBatch, Inputs]]


class FaultsError(Exception):
    """An attempt at an update found faulty gradients: it is undone, and repeated without them.

    Attributes:
        faults: the gradients, and what is wrong with each.
    """

    def __init__(self, faults: dict[str, str]) -> None:
        super().__init__(f"faulty gradients: {faults}")
        self.faults = faults


class Step:
    """Makes steps: every update is computed, checked and applied, or undone.

    ::

        run                       for each update of a step:
            attempt               until all gradients that take part are healthy:
                backward              gradients of sources and memory         (Algorithm 2, lines 3, 4, 7)
                penalty_gradient      orthogonality gradient                  (line 5)
                gramian               Gramian and health of the gradients     (line 8)
                store                 memory gets the new samples, while a GPU computes
                check_health          undo and repeat without non-finite gradients
                weigh                 weights of the gradients                (line 9)
                combine               update of the backbone                  (line 10)
            update                optimiser, average of the weights           (lines 6 and 11)
            after_update          losses after the update, for methods that ask for them

    Args:
        engine: computes gradients and updates.
        model: the shared model.
        method: how gradients become an update.
        memory: of earlier samples, or None.

    Attributes:
        draws_ahead: whether the next update's replay batch is drawn while a device computes this update.
    """

    def __init__(self, engine: Engine, model: SharedModel, method: Method, memory: Memory | None) -> None:
        self._engine = engine
        self._model = model
        self._method = method
        self._is_penalty_coupled = method.settings.coupled
        self._memory = memory
        self._transaction = Transaction(engine, method, memory, model.device)
        self._frozen_normalisations = frozen_normalisations(model.backbone)
        self._seconds: dict[str, float] = {}
        self.draws_ahead = model.device.type != "cpu" and vars(type(memory)).get("draws_ahead", False)
        self.keep_statistics()

    def run(
        self,
        samples: Sequence[Samples],
        update: Update,
        options: StepOptions,
        meanwhile: Callable[[], object] | None = None,
    ) -> Result:
        """Make the updates of a step; return the result of the first one, and everything skipped in any of them.

        A source that is skipped takes no part in the further updates of the step. An update that raises is undone;
        earlier updates remain. ``meanwhile`` is called in each attempt at the first update, after its work is launched.
        """
        captured = self._engine.capture_seconds
        for module in (self._model.backbone, *self._model.encoders):
            if not module.training:
                module.train()
        self.keep_statistics()
        self._seconds = {}
        results: list[Result] = []
        skipped: dict[str, str] = {}
        trained = samples
        while trained and len(results) < options.updates:
            is_last = len(results) == options.updates - 1
            done = self._update(trained, update, options, is_last=is_last, meanwhile=None if results else meanwhile)
            results.append(done)
            skipped = done.skipped | skipped
            trained = [group for group in samples if group.name not in skipped]
        if self._engine.capture_seconds > captured:
            self._seconds["capture"] = self._engine.capture_seconds - captured
        _count_skipped(samples, skipped)
        return replace(results[0], skipped=skipped, seconds=self._seconds)

    def try_each(self, samples: Sequence[Samples], update: Update, options: StepOptions) -> dict[str, TaskError]:
        """Return the errors that computing an update from each batch alone raises, by source; each update is undone."""
        raised: dict[str, TaskError] = {}
        for group in samples:
            self._transaction.begin(update.optimizer)
            try:
                self._attempt([group], options, apart=True)
            except FaultsError:
                pass  # a step skips them
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                if not isinstance(error, TaskError):
                    error = TaskError(f"{group.source.words}: {type(error).__name__}: {error}")
                raised[group.name] = error
            finally:
                self._transaction.rollback()
                self._transaction.commit()
        return raised

    def keep_statistics(self) -> None:
        """Put frozen batch-norm layers into evaluation mode, so that their running averages do not change."""
        for layer in self._frozen_normalisations:
            if layer.training:
                layer.eval()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the seconds of a phase."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + perf_counter() - begin

    # -- an update

    def _update(
        self,
        samples: Sequence[Samples],
        update: Update,
        options: StepOptions,
        *,
        is_last: bool,
        meanwhile: Callable[[], object] | None,
    ) -> Result:
        """Make one update, without the gradients that are faulty; undo everything if it raises."""
        result, trained = Result(), samples
        skipped: dict[str, str] = {}
        apart = False  # whether every batch gets its own pass
        self._transaction.begin(update.optimizer)
        try:
            while trained:
                try:
                    result = self._attempt(
                        trained, options, skipped=skipped, apart=apart, is_last=is_last, meanwhile=meanwhile
                    )
                    break
                except UnsupportedError:
                    if apart:
                        raise
                    apart = True
                except FaultsError as found:
                    skipped |= found.faults
                    apart = False
                self._transaction.rollback(draws=MEMORY not in skipped)  # a faulty memory draws other samples
                trained = [group for group in samples if group.name not in skipped]
            if trained:
                with self._phase("update"):
                    self._method.after_step(result.losses)
                    self._engine.update(update)  # lines 6 and 11
        except BaseException:
            self._transaction.rollback()
            raise
        finally:
            self._transaction.commit()
        if trained and self._method.watches_updates:
            with self._phase("update"):
                self._method.after_update(result.losses, self._losses_now(result))
        return replace(result, skipped=skipped, batches=())

    def _losses_now(self, result: Result) -> dict[str, float]:
        """Return the losses of an update's batches with the present weights; buffers and generators stay unchanged."""
        names, buffers = list(result.losses), self._engine.snapshot()
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                each = [batch.loss(self._method, self._model.outputs(batch.samples)) for batch in result.batches]
        finally:
            buffers.restore()
        losses = dict.fromkeys(names, 0.0)
        for batch, loss in zip(result.batches, torch.stack([loss.double() for loss in each]).tolist(), strict=True):
            losses[names[batch.gradient]] += loss
        return losses

    def _attempt(
        self,
        samples: Sequence[Samples],
        options: StepOptions,
        *,
        skipped: Collection[str] = (),
        apart: bool,
        is_last: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> Result:
        """Compute the update from the sources' batches and from memory: Algorithm 2, lines 3 to 10.

        Raise :class:`FaultsError` if gradients are faulty, :class:`UnsupportedError` if only separate passes can show
        which. Only the last update of a step stores the new samples in memory.
        """
        engine, method = self._engine, self._method
        replayed = 0 if MEMORY in skipped else self._number_to_replay(samples, options)
        known = self._known_gradients(samples, replayed)
        plan = self._reduction(known, options.measure_stability)
        engine.begin(plan)
        computed = self._backward(samples, replayed, options.augment, apart)  # lines 3, 4 and 7
        trains_backbone = engine.gradients.length > 0
        if method.settings.alpha > 0.0 and trains_backbone:
            with self._phase("orthogonality"):
                engine.penalty_gradient()  # line 5: α ∇ℓ_orth, the same for every task
        with self._phase("weighting"):
            needs_gramian = plan.is_separate or (method.reduction == "mean" and method.uses_gramian)
            wait = engine.gramian(needs_gramian and trains_backbone)  # line 8: GᵀG
        if meanwhile is not None:
            meanwhile()
        with self._phase("memory"):  # while a device computes
            self._store(computed, samples if is_last else ())
            self._draw_ahead(replayed)
        with self._phase("weighting"):
            gramian, health = wait()
            losses = self._check_health(plan, gramian, health, computed.passes)
            if not trains_backbone:
                return Result(losses, batches=computed.batches)
            result, rule = self._weigh(plan, gramian, losses, known)  # line 9: a weight for each gradient
            is_bounded = self._is_surely_finite(rule, norm_bounds(plan, gramian, health))
            if not engine.combine(rule, check=not is_bounded):  # line 10: the weighted sum
                reason = f"the update that {method!r} gives for this step is not finite"
                raise FaultsError({name: reason for name in losses if name != MEMORY})
            return replace(result, batches=computed.batches)

    # -- before the gradients are computed

    def _number_to_replay(self, batches: Sequence[Samples], options: StepOptions) -> int:
        """Return the number of samples to replay: by default the size of the largest batch; 0 if memory is empty."""
        if self._memory is None or not len(self._memory):
            return 0
        return options.memory_batch or max(group.y.shape[0] for group in batches)

    def _known_gradients(self, batches: Sequence[Samples], replayed: int) -> Gradients:
        """Return what is known of the step's gradients before they are computed."""
        parts = [(group.name, group.task.classes or 1, group.y.shape[0]) for group in batches]
        replayable: list[str] = []
        if replayed and self._memory is not None:
            replayable = self._memory.replayable_sources()
            tasks = dict.fromkeys(self._model.sources[name].task for name in replayable)
            parts.append((MEMORY, sum(task.classes or 1 for task in tasks), replayed))
        names, classes, samples = zip(*parts, strict=True)
        losses = np.array([np.nan] * len(names))
        return Gradients(names, losses, None, classes, samples, tuple(replayable))

    def _reduction(self, known: Gradients, separate: bool) -> ReductionPlan:
        """Plan the reduction of the step's gradients; for reduction ``"sum"`` the method's weights are needed now."""
        weights: list[float] = []
        if self._method.reduction == "sum":
            weights = self._method_weights(known).values.tolist()
        return ReductionPlan.make(known.names, self._method.reduction, separate=separate, weights=weights)

    # -- gradients

    def _backward(self, samples: Sequence[Samples], replayed: int, augment: Transform | None, apart: bool) -> Computed:
        """Compute the gradients of sources, memory, encoders and heads: Algorithm 2, lines 3, 4 and 7."""
        engine, method, index = self._engine, self._method, len(samples)
        early = augment if method.watches_updates else None  # the losses after the update are of the same inputs
        late = None if method.watches_updates else augment
        draws = range(method.draws if replayed else 0)
        edits: list[tuple[ReplayBatch, Inputs]] = []
        with self._phase("memory"):
            drawn = [] if method.edits_memory else [self._samples_of(self._draw(replayed)) for _ in draws]
        with self._phase("tasks"):
            batches = [StepBatch(place, [group]) for place, group in enumerate(self._augmented(samples, early))]
            batches += [StepBatch(index, self._augmented(each, early), draw) for draw, each in enumerate(drawn)]
            passes = engine.backward(batches, late, apart=apart)
        with self._phase("memory"):
            for draw in draws if method.edits_memory else ():
                chosen = self._draw(replayed)
                given = self._samples_of(chosen)
                try:
                    inputs = [*method.edit(chosen, _LookAhead(self._model, method, given, engine.mean_of_sources()))]
                except (RuntimeError, ValueError) as error:
                    if isinstance(error, SpclError) or is_out_of_memory(error):
                        raise
                    fault: str | None = f"the model raised an error on the replay batch: {error}"
                else:
                    edits += zip(chosen, inputs, strict=True)
                    batches.append(StepBatch(index, self._augmented(with_inputs(given, inputs), early), draw))
                    fault = engine.backward(batches[-1:], late, apart=True).memory_fault
                if fault is not None:
                    passes = passes._replace(memory_fault=fault)
                    break
        return Computed(passes, batches, edits)

    def _augmented(self, samples: Sequence[Samples], augment: Transform | None) -> Sequence[Samples]:
        if augment is None:
            return samples
        return with_inputs(samples, augmented(augment, [group.x for group in samples], self._model.device))

    # -- memory

    def _draw(self, count: int) -> list[ReplayBatch]:
        assert self._memory is not None
        return self._memory.draw(count)

    def _samples_of(self, drawn: Sequence[ReplayBatch]) -> list[Samples]:
        """Return a replay batch as samples of the sources."""
        sources = self._model.sources
        return [Samples(sources[part.source], part.x, part.y, part.logits, replayed=True) for part in drawn]

    def _store(self, computed: Computed, new: Sequence[Samples]) -> None:
        """Store edited and new samples in memory, until the transaction is rolled back."""
        if self._memory is None:
            return
        for batch, x in computed.edits:
            self._memory.replace(batch, x)
        for group in new:
            self._memory.observe(group.name, group.x, group.y, computed.passes.logits.get(group.name))

    def _draw_ahead(self, replayed: int) -> None:
        """Draw the next update's replay batch now, assuming that it has the same size."""
        if self.draws_ahead and self._memory is not None and replayed:
            for _ in range(self._method.draws):
                draw_ahead(self._memory, replayed)

    # -- health

    def _check_health(
        self, plan: ReductionPlan, gramian: Array | None, health: Array, passes: Passes
    ) -> dict[str, float]:
        """Return the losses; raise FaultsError if gradients are faulty, UnsupportedError if it is unknown which."""
        names = plan.names if passes.memory_fault is None else plan.names[:-1]
        health = health[: len(names)].copy()
        norms: Array | None = None
        if gramian is not None and plan.is_separate:  # health has the norms of the heads' gradients only
            largest = torch.finfo(self._engine.gradients.dtype).max
            norms = norms_from_squares(gramian.diagonal()[: len(names)], largest)
            health[:, NORM] += norms
        faults = find_faults(names, health, self._transaction.buffers_were_finite)
        if faults and passes.is_joint:
            if norms is not None:  # of each gradient alone, so that one bad task does not hide in the sum
                health[:, NORM], health[:, BUFFERS] = norms, 0.0
                faults = find_faults(names, health, self._transaction.buffers_were_finite)
            if norms is None or not faults:
                raise UnsupportedError("numbers are not finite; separate passes show in which batch")
        if passes.memory_fault is not None:
            faults = {MEMORY: passes.memory_fault, **faults}
        if faults:
            raise FaultsError(faults)
        return dict(zip(names, health[:, LOSS].tolist(), strict=True))

    def _is_surely_finite(self, rule: Rule, norms: Array) -> bool:
        """Return whether Σ|w_i|·‖g_i‖ shows that the update is finite, without computing its norm."""
        is_penalty_added = self._method.settings.alpha > 0.0 and not self._is_penalty_coupled
        if callable(rule) or is_penalty_added or len(norms) < len(rule):  # the norm of the penalty is not known
            return False
        sizes, largest = np.abs(rule), torch.finfo(self._engine.gradients.dtype).max
        return bool(sizes @ norms[: len(rule)] < largest and sizes.max() < largest)

    # -- weights

    def _weigh(
        self, plan: ReductionPlan, gramian: Array | None, losses: dict[str, float], known: Gradients
    ) -> tuple[Result, Rule]:
        """Weigh the gradients; return the result, and the weight of every row or the method's own rule."""
        method = self._method
        mixing = self._engine.gradients.penalty_matrix(self._is_penalty_coupled)
        before = gramian if gramian is None or mixing is None else mixing @ gramian @ mixing.T
        measured = torch.from_numpy(before) if plan.is_separate else None
        if method.elementwise:
            return Result(losses, before=measured), self._method_update
        weights = self._reduced_weights(plan, losses, before, known)
        values = weights.values.detach().to("cpu", torch.float64).numpy()
        per_gradient = plan.matrix.T @ values
        after: Tensor | None = None
        if measured is not None:
            adjusted = weights if method.reduction == "none" else Weights(torch.from_numpy(per_gradient))
            after = adjusted.adjusted_gramian(measured).detach()
        per_row: Array = plan.reduction.T @ values
        by_name = dict(zip(plan.names, per_gradient.tolist(), strict=True))
        return Result(losses, by_name, measured, after), per_row if mixing is None else mixing.T @ per_row

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


class Transaction:
    """The state that an update changes before it is known to be finite, and by which it is undone.

    It consists of the buffers of backbone, encoders and heads (batch-norm's running averages), the random number
    generators of dropout, the draws and the samples of memory, the state of the method, and the parameters' ``.grad``.
    """

    def __init__(self, engine: Engine, method: Method, memory: Memory | None, device: torch.device) -> None:
        self._engine = engine
        self._method = method
        self._memory = memory
        self._cuda_generator = _cuda_generator(device)

    def begin(self, optimizer: Optimizer) -> None:
        """Save the state before an update by this optimiser."""
        self._optimizer = optimizer
        self._buffers = self._engine.snapshot()
        self._random = torch.get_rng_state()
        self._cuda_offset = 0 if self._cuda_generator is None else self._cuda_generator.get_offset()
        if self._memory is not None:
            self._memory.begin()
        self._method_state = self._method.state_dict()

    def rollback(self, draws: bool = True) -> None:
        """Restore the saved state; if ``draws`` is false, memory's generator is left as it is."""
        self._buffers.restore()
        torch.set_rng_state(self._random)
        if self._cuda_generator is not None:
            self._cuda_generator.set_offset(self._cuda_offset)
        if self._memory is not None:
            self._memory.rollback(draws)
        self._method.load_state_dict(self._method_state)
        self._optimizer.zero_grad(set_to_none=True)

    def commit(self) -> None:
        """End the transaction: what memory has stored stays."""
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
    value marks it as faulty. Gradients after a faulty one may be faulty only because of it, so they are judged in the
    next attempt, unless their own loss is non-finite.

    Args:
        names: of the gradients, sources before memory.
        health: one row per gradient, with the columns :data:`LOSS`, :data:`NORM` and :data:`BUFFERS`.
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


def norms_from_squares(squares: Array, largest: float) -> Array:
    """Return the norms of gradients, given their squares.

    Squares above ``largest`` count as infinite: an optimiser that squares such a gradient overflows.

    >>> norms_from_squares(np.array([4.0, 1e39]), largest=3e38)
    array([ 2., inf])
    """
    return np.array([sqrt(abs(square)) if square < largest else inf for square in squares.tolist()])


def norm_bounds(plan: ReductionPlan, gramian: Array | None, health: Array) -> Array:
    """Return the row norms, or upper bounds on them from the norms of the gradients added to each row."""
    if gramian is not None:
        return np.sqrt(gramian.diagonal())
    norms: Array = health[:, NORM]
    bounds: Array = np.maximum(np.abs(plan.accumulation) @ norms, norms.max())
    return bounds


def _shape(value: object) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or the name of another type."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _count_skipped(samples: Sequence[Samples], skipped: Mapping[str, str]) -> None:
    """Count the steps in which sources were skipped, and warn where that happens repeatedly."""
    if MEMORY in skipped:
        warnings.warn(f"memory was skipped in a step: {skipped[MEMORY]}", RuntimeWarning, stacklevel=4)
    for source in (group.source for group in samples):
        if source.name not in skipped:
            source.skipped_in_a_row = 0
            continue
        source.skipped += 1
        source.skipped_in_a_row += 1
        if source.skipped_in_a_row == WARN_AFTER:
            warnings.warn(
                f"{source.words} was skipped in {WARN_AFTER} steps in a row: {skipped[source.name]}; "
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
