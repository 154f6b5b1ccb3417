"""The phases of a run: start or resume, train, evaluate, save, and write the result."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spcl.checkpoint import read_newest
from spcl.data import ImageData, SourceData
from spcl.distributed import World
from spcl.errors import SpclError
from spcl.files import write_json
from spcl.learner import Learner, StepReport
from spcl.runs.build import inputs_of, learner_parts, make_learner
from spcl.runs.devices import pick_device
from spcl.runs.environment import current_environment
from spcl.runs.evaluation import (
    Evaluation,
    average_accuracy,
    convolution_statistics,
    evaluate,
    evaluate_on_ranks,
    forgetting,
)
from spcl.runs.folder import RunFolder
from spcl.runs.metrics import MetricsFile, Recorder, SilentRecorder
from spcl.runs.model import save_model
from spcl.runs.problem import make_problem
from spcl.runs.provenance import Provenance
from spcl.runs.result import DataSummary, RunResult, TaskResult
from spcl.runs.settings import RunSettings
from spcl.runs.signals import stop_requested
from spcl.runs.tasks import add_task, make_heads, make_losses
from spcl.runs.view import View
from spcl.streams import Moment
from spcl.trackers import Tracker, close_tracker, tracker_errors

__all__ = ["InterruptedRunError", "TrainingRun"]


class InterruptedRunError(SpclError):
    """A run that was stopped by a signal and saved; resuming continues it exactly."""


@dataclass
class Progress:
    """The state of a run apart from its learner and stream: accuracies, training time, length of the metrics file."""

    at_end: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    trained_seconds: float = 0.0
    metrics_position: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        vars(self).update(state)


class TrainingRun:
    """One run in a folder that the caller has locked, new or resumed from the folder's checkpoint.

    Args:
        settings: its settings.
        folder: its folder.
        view: receives its progress.
        trackers: receive its metrics.
        data: used instead of the data that the settings name, if given.
        distributed: the ranks that make the run together, or None; the first one writes.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: RunFolder,
        view: View,
        trackers: Sequence[Tracker],
        data: ImageData | SourceData | None = None,
        distributed: World | None = None,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.view = view
        self.trackers = trackers
        self.distributed = distributed
        self.writes = distributed is None or distributed.is_first
        self.device = pick_device(settings.device)
        if distributed is not None:
            distributed.check_device(self.device)
        if threads := settings.threads or (1 if self.device.type == "cuda" else None):
            torch.set_num_threads(threads)  # beside a GPU the CPU has only small matrices to work on
        self.problem = make_problem(settings, self.device, data)
        self.provenance = Provenance(folder.path, settings, self.problem.data)
        self.progress = Progress()
        self.tables: dict[str, NDArray[np.int64]] = {}
        if distributed is not None:
            distributed.check_same("data", self.provenance.fingerprint)
        saved = self._saved() if distributed is None else distributed.from_first(self._saved)
        self.learner = self._start() if saved is None else self._resume(saved)
        self.recorder = self._make_recorder()
        self._saved_at = time.monotonic()
        self._pending_view: Callable[[], None] | None = None

    def complete(self) -> RunResult:
        """Train to the end, write ``result.json`` and return it."""
        with ExitStack() as opened:
            for tracker in self.trackers:
                opened.callback(close_tracker, tracker)
            opened.callback(self.view.close)
            opened.callback(self.recorder.close)
            self.view.begin(self.settings, self.problem, self.learner.steps)
            if self.learner.steps == 0:
                self._record_start()
            self._train()
            result = self._result()
            if self.writes:
                self._write(result)
            self.view.end(result)
            return result

    # -- start or resume

    def _start(self) -> Learner:
        steps = len(self.problem.stream)
        learner = make_learner(self.settings, self.problem.data, self.device, steps, self.distributed)
        make_heads(self.problem.tasks.values(), learner.model.backbone, self.settings)  # an error now, not mid-run
        return learner

    def _saved(self) -> dict[str, Any] | None:
        return read_newest(self.folder.checkpoint) if self.folder.has_checkpoint() else None

    def _make_recorder(self) -> Recorder | SilentRecorder:
        if not self.writes:
            return SilentRecorder()
        return Recorder(MetricsFile(self.folder.metrics, self.progress.metrics_position), self.trackers)

    def _resume(self, saved: Mapping[str, Any]) -> Learner:
        if provenance := saved.get("sources", {}).get("origin"):  # checkpoints of early versions have none
            self.provenance.load_state_dict(provenance)
        parts = learner_parts(self.settings, self.problem.data, self.device, len(self.problem.stream))
        tasks = [self.problem.tasks[task["name"]] for task in saved["tasks"]]
        return Learner.load(
            saved,
            **parts,
            heads=make_heads(tasks, parts["backbone"], self.settings),
            losses=make_losses(tasks, self.settings),
            stream=self.problem.stream,
            progress=self.progress,
            distributed=self.distributed,
        )

    def _record_start(self) -> None:
        configuration = self.problem.configuration
        self.recorder.start(
            scenario=self.settings.scenario,
            tasks=list(self.problem.stream.names),
            label_set=[list(classes) for classes in configuration.label_set],
            timeline=[list(span) for span in configuration.timeline.spans],
        )

    # -- train

    def _train(self) -> None:
        with stop_requested() as stop:
            for moment in self.problem.stream:
                report = self._train_step(moment)
                self._record(moment, report)
                self._evaluate_if_due(moment, report)
                self._show_later(moment, report)
                self._save_if_due(self._is_any(stop.is_set()))

    def _is_any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank: a signal reaches them between different steps."""
        return condition if self.distributed is None else self.distributed.any(condition)

    def _train_step(self, moment: Moment) -> StepReport:
        begin = time.perf_counter()
        if self.learner.steps == self.settings.unfreeze_after:
            self.learner.unfreeze()
        for name in moment.started:
            add_task(self.learner, self.problem.tasks[name], self.settings)
        report = self.learner.step(moment.batches, meanwhile=self._meanwhile)
        for name in moment.ended:
            self.learner.finish_task(name)
        self.progress.trained_seconds += time.perf_counter() - begin
        return report

    def _meanwhile(self) -> None:
        """Fetch the next batches and update the view while a GPU computes."""
        self.problem.stream.prefetch()
        self._show()

    def _record(self, moment: Moment, report: StepReport) -> None:
        if report.step % self.settings.record_every == 0 or report.skipped:
            self.recorder.step(moment.step, report)

    def _show_later(self, moment: Moment, report: StepReport) -> None:
        """Leave updating the view to the next step; after the last step, update it now."""
        self._pending_view = partial(self.view.step, moment.step, report, dict(self.progress.latest))
        if self._is_last_step():
            self._show()

    def _show(self) -> None:
        if self._pending_view is not None:
            self._pending_view()
            self._pending_view = None

    def _is_last_step(self) -> bool:
        return self.learner.steps == len(self.problem.stream)

    # -- evaluate

    def _evaluate_if_due(self, moment: Moment, report: StepReport) -> None:
        if tasks := self._tasks_to_evaluate(moment, report):
            accuracies, self.tables = self._evaluation(tasks)
            self.progress.latest |= accuracies
            self.progress.at_end |= {task: accuracies[task] for task in moment.ended}
            self.recorder.evaluation(moment.step, moment.ended, accuracies)

    def _tasks_to_evaluate(self, moment: Moment, report: StepReport) -> list[str]:
        every = self.settings.evaluate_every
        if moment.ended and self.settings.evaluate == "ended" and not self._is_last_step():
            return list(moment.ended)
        due = moment.ended or self._is_last_step() or (every is not None and (report.step + 1) % every == 0)
        return list(self.learner.tasks) if due else []

    def _evaluation(self, tasks: list[str]) -> Evaluation:
        tests = {task: self.problem.tests[task] for task in tasks}
        if self.distributed is None:
            return evaluate(self.learner, tests, self.problem.tasks)
        return evaluate_on_ranks(self.distributed, self.learner, tests, self.problem.tasks)

    # -- save

    def _save_if_due(self, stop: bool) -> None:
        if not stop and time.monotonic() - self._saved_at < self.settings.checkpoint_seconds:
            return
        self.progress.metrics_position = self.recorder.sync()
        self.learner.save(
            self.folder.checkpoint, stream=self.problem.stream, progress=self.progress, origin=self.provenance
        )
        self._saved_at = time.monotonic()
        if stop:
            self._show()
            steps = f"{self.learner.steps} of {len(self.problem.stream)}"
            raise InterruptedRunError(f"stopped after step {steps} and saved")

    # -- result

    def _write(self, result: RunResult) -> None:
        if self.settings.keep_model:
            save_model(self.folder, self.learner, self.problem.tasks.values(), inputs_of(self.problem.data))
        write_json(self.folder.result, result.model_dump(mode="json"))
        for tracker in self.trackers:
            with tracker_errors(tracker):
                tracker.result(result.accuracy, result.forgetting)
        self.folder.remove_checkpoints()

    def _result(self) -> RunResult:
        final, at_end = self.progress.latest, self.progress.at_end
        tables = self.tables or self._evaluation(list(final)).tables  # empty when resumed after the last step
        tasks = self.problem.tasks
        return RunResult(
            scenario=self.settings.scenario,
            benchmark=self.settings.benchmark,
            data=DataSummary.of(self.problem.data),
            method=self.settings.method["name"],
            preset=self.settings.preset,
            config=self.settings.config,
            seed=self.settings.seed,
            accuracy=average_accuracy(final),
            forgetting=forgetting(final, at_end),
            tasks={
                task: TaskResult(at_end=at_end[task], final=final[task], metric=tasks[task].metric) for task in final
            },
            confusion={task: tables[task].tolist() for task in final if task in tables},
            class_names={task: tasks[task].class_names for task in final if tasks[task].class_names},
            filters=convolution_statistics(self.learner.model.backbone),
            left_out={task.name: task.skipped for task in self.learner.tasks.values() if task.skipped},
            steps=self.learner.steps,
            fingerprint=self.provenance.fingerprint,
            timeline=self.problem.configuration.timeline.spans,
            environment=current_environment(self.device, self.distributed),
            seconds={"training": self.progress.trained_seconds},
        )
