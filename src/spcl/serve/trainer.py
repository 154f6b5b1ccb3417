"""Training on the moments of a live stream: test, then train; what cannot be learned is a dead letter."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from spcl.batches import Batch
from spcl.errors import SpclError, is_out_of_memory
from spcl.learner import Learner, StepReport
from spcl.runs import RunSettings
from spcl.runs.tasks import add_task
from spcl.serve.events import Event, StepEvent, TaskEvent
from spcl.serve.records import Records
from spcl.streams import Moment

__all__ = ["Trainer"]

MEASURING_SHARE = 0.01
"""The largest part of the time that tests of batches before training, and κ, take."""


class Trainer:
    """Trains a learner on moments.

    Args:
        learner: the learner.
        settings: with which its tasks are made.
        records: of all tasks; those of the moments have a schema.
        on_event: receives what happens.
        reject: called as ``reject(task, batch, reason)`` with a batch that cannot be learned.
        clock: the time in seconds, which never goes back.
    """

    def __init__(
        self,
        learner: Learner,
        settings: RunSettings,
        records: Records,
        on_event: Callable[[Event], object],
        reject: Callable[[str, Batch, str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner = learner
        self._settings = settings
        self._records = records
        self._on_event = on_event
        self._reject = reject
        self._clock = clock
        self._measure_at = clock()

    def train(self, moment: Moment) -> None:
        """Add the tasks that are new, learn the batches, and finish the tasks that ended."""
        batches = {name: batch for name, batch in moment.batches.items() if self._admit(name, batch)}
        if batches:
            is_measured = self._clock() >= self._measure_at
            self._step(batches, self._test(batches) if is_measured else {}, is_measured)
        for name in moment.ended:
            if name in self._learner.tasks:
                self._learner.finish_task(name)

    def _admit(self, name: str, batch: Batch) -> bool:
        """Add the task of a first batch to the learner; return whether it is there."""
        if name in self._learner.tasks:
            return True
        record = self._records.tasks[name]
        try:
            add_task(self._learner, record.run_task, self._settings)
        except SpclError as error:
            self._reject(name, batch, str(error))
            return False
        self._on_event(TaskEvent(time.time(), name, "started", f"{record.schema}"))
        return True

    def _test(self, batches: Mapping[str, Batch]) -> dict[str, float]:
        """Return the accuracies of classifiers on their batches."""
        tasks = self._learner.tasks
        known = [name for name in batches if tasks[name].classes is not None and tasks[name].signature is not None]
        try:
            with self._measuring():
                return {name: self._learner.evaluate([batches[name]], name) for name in known}
        except Exception:  # a batch that cannot be predicted cannot be learned, either: the step says so
            return {}

    def _step(self, batches: Mapping[str, Batch], accuracies: dict[str, float], is_measured: bool) -> None:
        """Learn the batches together; if that fails, one by one, to find those that cannot be learned."""
        begin = self._clock()
        try:
            report = self._learner.step(batches)
        except Exception as error:  # the learner is as it was before; the service must outlive any batch
            if is_out_of_memory(error):
                raise
            if len(batches) > 1:
                for name, batch in batches.items():
                    self._step({name: batch}, {}, is_measured)
            else:
                ((name, batch),) = batches.items()
                self._reject(name, batch, f"{type(error).__name__}: {error}")
            return
        samples = {name: y.shape[0] for name, (_, y) in batches.items()}
        for name, count in samples.items():
            self._records.tasks[name].batches += 1
            self._records.tasks[name].samples += count
        seconds = self._clock() - begin
        before, after = self._kappas(report) if is_measured else (None, None)
        self._on_event(_event(report, samples, accuracies, (before, after), seconds))

    def _kappas(self, report: StepReport) -> tuple[float | None, float | None]:
        """Return κ before and after, as far as the method computed gradients for it."""
        with self._measuring():
            kappas = [None if each is None else each.condition_number for each in (report.before, report.after)]
        return kappas[0], kappas[1]

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Put the next measurement off by as long as the time of the block is a share of.

        Time without batches counts, so that where they come rarely every one is measured, but none is saved up.
        """
        begin = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            self._measure_at = max(self._measure_at, end) + (end - begin) / MEASURING_SHARE


def _event(
    report: StepReport,
    samples: dict[str, int],
    accuracies: dict[str, float],
    kappas: tuple[float | None, float | None],
    seconds: float,
) -> StepEvent:
    return StepEvent(
        time=time.time(),
        step=report.step,
        samples=samples,
        losses=report.losses,
        accuracies=accuracies,
        kappa_before=kappas[0],
        kappa_after=kappas[1],
        skipped=tuple(report.skipped),
        seconds=seconds,
    )
