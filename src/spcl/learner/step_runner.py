"""Steps that skip faulty gradients: a step is undone and repeated without them."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from torch.optim import Optimizer

from spcl.engine.base import Engine
from spcl.engine.model import Samples, SharedModel
from spcl.learner.replay import Replay
from spcl.learner.rollback import Rollback
from spcl.learner.step import Outcome, Step
from spcl.memory import Memory
from spcl.methods.base import MEMORY, Method

__all__ = ["StepRunner"]

WARN_AFTER = 3


class StepRunner:
    """Runs one step after another: computes and applies the update, then shows it to method and memory."""

    def __init__(self, engine: Engine, model: SharedModel, method: Method, memory: Memory | None) -> None:
        self._engine = engine
        self._model = model
        self._method = method
        self._memory = memory
        self._replay = Replay(model, method, memory)
        self._rollback = Rollback(engine, method, memory, model.device)
        self._step = Step(engine, method, self._replay, self._rollback)

    def run(
        self,
        samples: Sequence[Samples],
        optimizer: Optimizer,
        *,
        memory_batch: int | None,
        measure_stability: bool,
        meanwhile: Callable[[], object] | None,
    ) -> tuple[Outcome, dict[str, str]]:
        """Run one step, or undo it if it raises; return its outcome and why gradients were skipped."""
        captured = self._engine.capture_seconds
        if not self._model.backbone.training:
            self._model.backbone.train()
        self._rollback.save()
        outcome, skipped, healthy = Outcome(), dict[str, str](), samples
        try:
            while healthy:
                replayed = 0 if MEMORY in skipped else self._replay.size(healthy, memory_batch)
                self._step.compute_update(outcome, healthy, replayed, measure_stability, meanwhile)
                if not outcome.faults:
                    break
                skipped |= outcome.faults
                meanwhile = None  # it has been called
                self._undo(optimizer, draws=MEMORY not in skipped)  # a faulty memory draws other samples next time
                healthy = [group for group in samples if group.task.name not in skipped]
                outcome = Outcome(seconds=outcome.seconds)
            begin = perf_counter()
            if healthy:
                self._engine.update(optimizer)
        except BaseException:
            self._undo(optimizer)
            raise
        self._observe(healthy, outcome)
        outcome.seconds["update"] = perf_counter() - begin
        if self._engine.capture_seconds > captured:
            outcome.seconds["capture"] = self._engine.capture_seconds - captured
        _count_skipped(samples, skipped)
        return outcome, skipped

    def _undo(self, optimizer: Optimizer, draws: bool = True) -> None:
        self._rollback.restore(draws)
        optimizer.zero_grad(set_to_none=True)

    def _observe(self, samples: Sequence[Samples], outcome: Outcome) -> None:
        """Pass the losses to the method, and the edited and new samples to memory."""
        if not samples:
            return
        self._method.after_step(outcome.losses)
        if self._memory is None:
            return
        for batch, x in outcome.edits:
            self._memory.replace(batch, x)
        for group in samples:
            self._memory.observe(group.task.name, group.x, group.y, outcome.logits.get(group.task.name))


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
