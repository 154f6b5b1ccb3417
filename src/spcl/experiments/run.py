"""One run: from settings to ``result.json``, interruptible at every step and resumable exactly."""

import platform
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import spcl
from spcl.checkpoint import read_newest
from spcl.errors import SpclError
from spcl.experiments.evaluation import average_accuracy, confusion, forgetting, own_share
from spcl.experiments.problem import Problem, make_backbone, make_memory, make_problem, pick_device
from spcl.experiments.record import MetricsFile, RunFolder, write_json, write_text
from spcl.experiments.settings import RunSettings, load_settings_file, resolve_settings, settings_text
from spcl.experiments.trackers import Tracker
from spcl.experiments.view import SilentView, View
from spcl.learner import Learner, StepReport
from spcl.methods import make_method
from spcl.orthogonality import filter_statistics
from spcl.stability import Stability

__all__ = ["InterruptedRunError", "execute", "resume_settings"]


class InterruptedRunError(SpclError):
    """The run was stopped by the user after saving; resuming continues it exactly."""


@dataclass
class Progress:
    """What a run has found out so far, apart from its model."""

    at_end: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    trained_seconds: float = 0.0
    metrics_position: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        vars(self).update(state)


def execute(
    settings: RunSettings,
    out: Path,
    *,
    resume: bool = False,
    view: View | None = None,
    trackers: tuple[Tracker, ...] = (),
) -> dict[str, Any]:
    """Train and evaluate as the settings say, leaving everything in the folder ``out``; gives the result.

    A finished run is not run again. With ``resume`` an unfinished one goes on where it was saved; without, a folder
    that holds one is refused.
    """
    folder = RunFolder(out)
    with folder.locked():
        finished = folder.read_result()
        if finished is not None:
            return finished
        if not resume and folder.has_checkpoint():
            raise SpclError(f"{out} holds an unfinished run; continue it with --resume, or choose another --out")
        write_text(folder.settings, settings_text(settings))
        return _Run(settings, folder, view or SilentView(), trackers).to_the_end()


def resume_settings(out: Path) -> RunSettings:
    """The settings of the run in this folder."""
    folder = RunFolder(out)
    if not folder.settings.exists():
        raise SpclError(f"there is no run in {out} to resume; leave --resume away to start one")
    return resolve_settings(load_settings_file(folder.settings))


class _Run:
    def __init__(self, settings: RunSettings, folder: RunFolder, view: View, trackers: tuple[Tracker, ...]) -> None:
        self.settings = settings
        self.folder = folder
        self.view = view
        self.trackers = trackers
        self.device = pick_device(settings.device)
        if threads := settings.threads or (1 if self.device.type == "cuda" else None):
            torch.set_num_threads(threads)  # beside a GPU the CPU has only small matrices to work on
        self.problem: Problem = make_problem(settings, self.device)
        self.progress = Progress()
        self.learner = self._resumed_learner() if folder.has_checkpoint() else self._new_learner()
        self.metrics = MetricsFile(folder.metrics, self.progress.metrics_position)
        self._saved_at = time.monotonic()

    # -- the learner

    def _new_learner(self) -> Learner:
        torch.manual_seed(self.settings.seed)
        name, options = _split_method(self.settings.method)
        method = make_method(name, **options)
        backbone = make_backbone(self.settings, self.problem.data, self.device)
        kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[self.settings.optimizer]
        return Learner(
            backbone,
            method,
            optimizer=lambda parameters: kind(parameters, lr=self.settings.learning_rate, fused=True),
            memory=make_memory(self.settings, method.edits_memory, self.device),
            scenario=self.settings.scenario,
            memory_batch=self.settings.batch_size,
            autocast=torch.bfloat16 if self.settings.precision == "bfloat16" else None,
            measure_stability=self.settings.stability,
            seed=self.settings.seed,
        )

    def _resumed_learner(self) -> Learner:
        _, used = read_newest(self.folder.checkpoint)
        backbone = make_backbone(self.settings, self.problem.data, self.device)
        return Learner.load(used, backbone=backbone, stream=self.problem.stream, progress=self.progress)

    # -- the loop

    def to_the_end(self) -> dict[str, Any]:
        stream = self.problem.stream
        self.view.begin(self.settings, self.problem, self.learner.steps)
        if self.learner.steps == 0:
            self._record_start()
        try:
            with _stop_requested() as stop:
                for moment in stream:
                    begin = time.perf_counter()
                    for name in moment.started:
                        self.learner.add_task(name, classes=stream.classes[name])
                    report = self.learner.step(moment.batches)
                    for name in moment.ended:
                        self.learner.finish_task(name)
                    self.progress.trained_seconds += time.perf_counter() - begin
                    self._after_step(moment.step, report, moment.ended, last=len(stream) == self.learner.steps)
                    self._save_if_due(stop.is_set())
            result = self._result()
            write_json(self.folder.result, result)
            self.folder.drop_checkpoints()
            self.view.end(result)
            return result
        finally:
            self.metrics.close()
            self.view.close()
            for tracker in self.trackers:
                tracker.close()

    def _after_step(self, step: int, report: StepReport, ended: tuple[str, ...], last: bool) -> None:
        if report.step % self.settings.record_every == 0 or report.dropped:
            values = _step_values(report)
            self.metrics.write("step", step=step, **values)
            for tracker in self.trackers:
                tracker.step(step, values)
        every = self.settings.evaluate_every
        if last:
            self._evaluate(step, list(self.learner.tasks), ended)
        elif ended:
            self._evaluate(step, list(ended) if self.settings.evaluate == "ended" else list(self.learner.tasks), ended)
        elif every is not None and (report.step + 1) % every == 0:
            self._evaluate(step, list(self.learner.tasks), ended)
        self.view.step(step, report, self.progress.latest)

    def _evaluate(self, step: int, tasks: list[str], ended: tuple[str, ...]) -> None:
        for task in tasks:
            table = confusion(self.learner, task, *self.problem.tests[task])
            self.progress.latest[task] = own_share(self.learner, task, table)
        for task in ended:
            self.progress.at_end[task] = self.progress.latest[task]
        accuracies = {task: self.progress.latest[task] for task in tasks}
        self.metrics.write("evaluation", step=step, ended=list(ended), accuracy=accuracies)
        for tracker in self.trackers:
            tracker.evaluation(step, accuracies)

    def _save_if_due(self, stop: bool) -> None:
        if not stop and time.monotonic() - self._saved_at < self.settings.checkpoint_seconds:
            return
        self.progress.metrics_position = self.metrics.state_dict()["position"]
        self.learner.save(self.folder.checkpoint, stream=self.problem.stream, progress=self.progress)
        self._saved_at = time.monotonic()
        if stop:
            raise InterruptedRunError(
                f"stopped after step {self.learner.steps} of {len(self.problem.stream)} and saved; "
                f"continue with: spcl run --out {self.folder.path} --resume"
            )

    # -- what is written

    def _record_start(self) -> None:
        configuration = self.problem.configuration
        self.metrics.write(
            "start",
            scenario=self.settings.scenario,
            tasks=list(self.problem.stream.names),
            label_set=[list(classes) for classes in configuration.label_set],
            timeline=[list(span) for span in configuration.timeline.spans],
        )

    def _result(self) -> dict[str, Any]:
        final, at_end = self.progress.latest, self.progress.at_end
        return {
            "scenario": self.settings.scenario,
            "benchmark": self.settings.benchmark,
            "data": f"{self.problem.data!r}",
            "method": self.settings.method["name"],
            "preset": self.settings.preset,
            "config": self.settings.config,
            "seed": self.settings.seed,
            "accuracy": average_accuracy(final),
            "forgetting": forgetting(final, at_end),
            "tasks": {task: {"at_end": at_end[task], "final": final[task]} for task in final},
            "confusion": {task: self._confusion(task).tolist() for task in final},
            "filters": self._filters(),
            "left_out": {task.name: task.left_out for task in self.learner.tasks.values() if task.left_out},
            "steps": self.learner.steps,
            "timeline": [list(span) for span in self.problem.configuration.timeline.spans],
            "environment": _environment(self.device),
            "seconds": {"training": self.progress.trained_seconds},
        }

    def _confusion(self, task: str) -> NDArray[np.int64]:
        return confusion(self.learner, task, *self.problem.tests[task])

    def _filters(self) -> dict[str, dict[str, float | None]]:
        """Conditioning, norm and redundancy of the backbone's convolutions (paper, §5.4)."""
        backbone = self.learner.model.backbone
        names = [name for name, layer in backbone.named_modules() if isinstance(layer, torch.nn.Conv2d)]
        statistics = filter_statistics(backbone, names) if names else {}
        return {name: _finite(vars(values)) for name, values in statistics.items()}


def _split_method(method: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return method["name"], {name: value for name, value in method.items() if name != "name"}


def _step_values(report: StepReport) -> dict[str, Any]:
    return {
        "losses": report.losses,
        "weights": report.weights,
        "before": _stability_values(report.before),
        "after": _stability_values(report.after),
        **({"dropped": report.dropped} if report.dropped else {}),
    }


def _stability_values(stability: Stability | None) -> dict[str, float | None] | None:
    if stability is None or len(stability.gramian) < 2:
        return None
    values = {
        "condition_number": stability.condition_number,
        "cosine": stability.mean_cosine,
        "magnitude_similarity": stability.mean_magnitude_similarity,
    }
    return _finite(values)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {name: value if np.isfinite(value) else None for name, value in values.items()}


def _environment(device: torch.device) -> dict[str, Any]:
    return {
        "spcl": spcl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "git": _git_commit(),
    }


def _git_commit() -> str | None:
    """The commit of the source tree this package runs from, if it is one."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


@contextmanager
def _stop_requested() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C (or a polite kill) sets; the second one ends the process at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
