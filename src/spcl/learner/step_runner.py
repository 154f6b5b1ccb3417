"""Steps that skip faulty gradients: a step is undone and repeated without them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from spcl.engine.base import Engine
from spcl.engine.model import Samples, SharedModel
from spcl.engine.update import Update
from spcl.errors import TaskError
from spcl.learner.freezing import frozen_normalisations
from spcl.learner.replay import Replay
from spcl.learner.rollback import Rollback
from spcl.learner.step import Meanwhile, Outcome, Step, StepOptions
from spcl.memory import Memory
from spcl.methods.base import MEMORY, Method

__all__ = ["StepRunner"]

WARN_AFTER = 3


class StepRunner:
    """Runs one step after another: computes and applies its updates, and shows them to method and memory.

    Attributes:
        draws_ahead: whether the samples that the next update replays are drawn while a device computes this one.
    """

    def __init__(self, engine: Engine, model: SharedModel, method: Method, memory: Memory | None) -> None:
        self._engine = engine
        self._model = model
        self._method = method
        self._memory = memory
        self._replay = Replay(model, method, memory)
        self._rollback = Rollback(engine, method, memory, model.device)
        self._step = Step(engine, method, self._replay, self._rollback)
        self.draws_ahead = model.device.type != "cpu" and vars(type(memory)).get("draws_ahead", False)
        self._frozen_normalisations = frozen_normalisations(model.backbone)
        self._keep_statistics()

    def run(
        self,
        samples: Sequence[Samples],
        update: Update,
        options: StepOptions,
        meanwhile: Meanwhile | None = None,
    ) -> tuple[Outcome, dict[str, str]]:
        """Run one step; return the outcome of its first update and why gradients were skipped in any.

        An update that raises is undone. A task that is skipped takes no part in the further updates of the step. Once a
        GPU's work is queued, ``meanwhile`` is called.
        """
        meanwhile = _once(meanwhile)
        captured = self._engine.capture_seconds
        if not self._model.backbone.training:
            self._model.backbone.train()
        self._keep_statistics()
        trained, skipped, outcomes = samples, dict[str, str](), list[Outcome]()
        while trained and len(outcomes) < options.updates:
            is_last = len(outcomes) == options.updates - 1
            outcome, faults = self._update(trained, update, options, meanwhile, is_last)
            skipped = faults | skipped
            trained = [group for group in samples if group.task.name not in skipped]
            outcomes.append(outcome)
        first, *others = outcomes
        for phase, seconds in ((phase, seconds) for other in others for phase, seconds in other.seconds.items()):
            first.seconds[phase] = first.seconds.get(phase, 0.0) + seconds
        if self._engine.capture_seconds > captured:
            first.seconds["capture"] = self._engine.capture_seconds - captured
        _count_skipped(samples, skipped)
        return first, skipped

    def errors(self, samples: Sequence[Samples], update: Update, options: StepOptions) -> dict[str, TaskError]:
        """Return the errors that computing an update from each batch alone raises, by task; every update is undone."""
        raised = {}
        for group in samples:
            self._rollback.save()
            try:
                self._computed([group], {}, update, options, _nothing, is_last=False)
            except TaskError as error:
                raised[group.task.name] = error
            finally:
                self._undo(update)
                self._rollback.end()
        return raised

    def _update(
        self,
        samples: Sequence[Samples],
        update: Update,
        options: StepOptions,
        meanwhile: Meanwhile,
        is_last: bool,
    ) -> tuple[Outcome, dict[str, str]]:
        """Make one update, or undo it if it raises; return its outcome and why gradients were skipped.

        The last update of a step shows its samples to memory.
        """
        self._rollback.save()
        skipped: dict[str, str] = {}
        try:
            outcome = self._computed(samples, skipped, update, options, meanwhile, is_last)
            with outcome.timed("update"):
                if outcome.losses:
                    self._method.after_step(outcome.losses)
                    self._engine.update(update)
        except BaseException:
            self._undo(update)
            raise
        finally:
            self._rollback.end()
        return outcome, skipped

    def _computed(
        self,
        samples: Sequence[Samples],
        skipped: dict[str, str],
        update: Update,
        options: StepOptions,
        meanwhile: Meanwhile,
        is_last: bool,
    ) -> Outcome:
        """Compute an update, as often as gradients turn out to be faulty; note which are skipped and why."""
        healthy, outcome = samples, Outcome()

        def while_computing() -> None:
            meanwhile()
            self._observe(healthy if is_last else [], outcome)
            self._draw_ahead(replayed, outcome)

        while healthy:
            replayed = 0 if MEMORY in skipped else self._replay.size(healthy, options.memory_batch)
            self._step.compute_update(outcome, healthy, replayed, options, while_computing)
            if not outcome.faults:
                break
            if not outcome.is_joint:
                skipped |= outcome.faults
            options = replace(options, separate_passes=outcome.is_joint)
            self._undo(update, draws=MEMORY not in skipped)  # a faulty memory draws other samples next time
            healthy = [group for group in samples if group.task.name not in skipped]
            outcome = Outcome(seconds=outcome.seconds)
        return outcome

    def _keep_statistics(self) -> None:
        """Put frozen normalisation layers into evaluation mode: what a frozen part computes must not drift."""
        for layer in self._frozen_normalisations:
            if layer.training:
                layer.eval()

    def _undo(self, update: Update, draws: bool = True) -> None:
        self._rollback.restore(draws)
        update.optimizer.zero_grad(set_to_none=True)

    def _observe(self, samples: Sequence[Samples], outcome: Outcome) -> None:
        """Show edited and new samples to memory, which forgets them again if the step is undone."""
        if self._memory is None:
            return
        with outcome.timed("memory"):
            for batch, x in outcome.edits:
                self._memory.replace(batch, x)
            for group in samples:
                self._memory.observe(group.task.name, group.x, group.y, outcome.logits.get(group.task.name))

    def _draw_ahead(self, replayed: int, outcome: Outcome) -> None:
        """Draw the samples that the next update replays if it replays as many, while a GPU computes this one."""
        if self._memory is not None and replayed and self.draws_ahead:
            with outcome.timed("memory"):
                for _ in range(self._method.draws):
                    self._memory.draw_ahead(replayed)


def _once(function: Meanwhile | None) -> Meanwhile:
    """Return a function that calls the given one, if there is one, the first time only."""
    return _nothing if function is None else lru_cache(maxsize=1)(function)


def _nothing() -> None:
    return


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
