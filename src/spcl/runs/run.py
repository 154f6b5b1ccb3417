"""One run: from settings to ``result.json``, interruptible at every step and resumable exactly."""

import platform
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import spcl
from spcl.checkpoint import read_newest
from spcl.data import ImageData
from spcl.errors import OutOfMemoryError, SpclError, is_out_of_memory
from spcl.learner import Learner, StepReport
from spcl.methods import make_method
from spcl.orthogonality import filter_statistics
from spcl.runs.evaluation import average_accuracy, confusions, forgetting, own_share
from spcl.runs.folders import check_folder
from spcl.runs.problem import Problem, make_backbone, make_memory, make_problem, pick_device
from spcl.runs.provenance import Provenance
from spcl.runs.record import MetricsFile, Recorder, RunFolder, finite, write_json, write_text
from spcl.runs.settings import RunSettings, load_settings_file, resolve_settings, settings_text
from spcl.runs.trackers import Tracker
from spcl.runs.view import SilentView, View

__all__ = ["InterruptedRunError", "execute", "make_learner", "resume_settings"]


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
    that holds one is refused. It is an error if the settings of either, or the data of the latter, were others.
    """
    folder = RunFolder(out)
    with folder.locked():
        finished, begun = folder.read_result(), folder.has_checkpoint()
        if begun and finished is None and not resume:
            raise SpclError(f"{out} holds an unfinished run; continue it with --resume, or choose another --out")
        if begun or finished is not None:
            check_folder(out, settings)
        if finished is not None:
            return finished
        if not (begun and folder.settings.exists()):
            write_text(folder.settings, settings_text(settings))
        with _plain_memory_errors():
            return _Run(settings, folder, view or SilentView(), trackers).to_the_end()


def resume_settings(out: Path) -> RunSettings:
    """The settings of the run in this folder."""
    folder = RunFolder(out)
    if not folder.settings.exists():
        raise SpclError(f"there is no run in {out} to resume; leave --resume away to start one")
    return resolve_settings(load_settings_file(folder.settings))


def make_learner(settings: RunSettings, data: ImageData, device: torch.device) -> Learner:
    """The learner that the settings describe, as it is before the first step."""
    torch.manual_seed(settings.seed)
    name, options = _split_method(settings.method)
    method = make_method(name, **options)
    return Learner(
        make_backbone(settings, data, device),
        method,
        optimizer=partial(_make_optimizer, settings),
        memory=make_memory(settings, method.edits_memory, device),
        scenario=settings.scenario,
        memory_batch=settings.batch_size,
        autocast=torch.bfloat16 if settings.precision == "bfloat16" else None,
        measure_stability=settings.stability,
        capture=settings.capture,
        seed=settings.seed,
    )


def _make_optimizer(settings: RunSettings, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.learning_rate, fused=True)
    on_cuda = parameters[0].is_cuda
    return torch.optim.Adam(parameters, lr=settings.learning_rate, fused=True, capturable=on_cuda)


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
        self.origin = Provenance(folder.path, settings, self.problem.data)
        self.progress = Progress()
        self.tables: dict[str, NDArray[np.int64]] = {}
        self.learner = self._learner()
        self.recorder = Recorder(MetricsFile(folder.metrics, self.progress.metrics_position), trackers)
        self._saved_at = time.monotonic()
        self._unshown: Callable[[], None] | None = None

    def _learner(self) -> Learner:
        if not self.folder.has_checkpoint():
            return make_learner(self.settings, self.problem.data, self.device)
        saved, used = read_newest(self.folder.checkpoint)
        if origin := saved.get("sources", {}).get("origin"):  # older checkpoints have none
            self.origin.load_state_dict(origin)
        backbone = make_backbone(self.settings, self.problem.data, self.device)
        return Learner.load(used, backbone=backbone, stream=self.problem.stream, progress=self.progress)

    # -- the loop

    def to_the_end(self) -> dict[str, Any]:
        with ExitStack() as opened:
            for tracker in self.trackers:
                opened.callback(tracker.close)
            opened.callback(self.view.close)
            opened.callback(self.recorder.close)
            self.view.begin(self.settings, self.problem, self.learner.steps)
            if self.learner.steps == 0:
                self._record_start()
            self._train()
            result = self._result()
            write_json(self.folder.result, result)
            self.folder.drop_checkpoints()
            self.view.end(result)
            return result

    def _train(self) -> None:
        stream = self.problem.stream
        with _stop_requested() as stop:
            for moment in stream:
                begin = time.perf_counter()
                for name in moment.started:
                    self.learner.add_task(name, classes=stream.classes[name])
                report = self.learner.step(moment.batches, meanwhile=self._meanwhile)
                for name in moment.ended:
                    self.learner.finish_task(name)
                self.progress.trained_seconds += time.perf_counter() - begin
                self._after_step(moment.step, report, moment.ended, last=len(stream) == self.learner.steps)
                self._save_if_due(stop.is_set())

    def _meanwhile(self) -> None:
        """While a GPU works: fetch what comes next, and show what was."""
        self.problem.stream.prefetch()
        self._show()

    def _show(self) -> None:
        if self._unshown is not None:
            self._unshown()
            self._unshown = None

    def _after_step(self, step: int, report: StepReport, ended: tuple[str, ...], last: bool) -> None:
        if report.step % self.settings.record_every == 0 or report.skipped:
            self.recorder.step(step, report)
        every = self.settings.evaluate_every
        if last:
            self._evaluate(step, list(self.learner.tasks), ended)
        elif ended:
            self._evaluate(step, list(ended) if self.settings.evaluate == "ended" else list(self.learner.tasks), ended)
        elif every is not None and (report.step + 1) % every == 0:
            self._evaluate(step, list(self.learner.tasks), ended)
        self._unshown = partial(self.view.step, step, report, dict(self.progress.latest))
        if last:
            self._show()

    def _evaluate(self, step: int, tasks: list[str], ended: tuple[str, ...]) -> None:
        self.tables = self._confusions(tasks)
        accuracies = {task: own_share(self.learner, task, table) for task, table in self.tables.items()}
        self.progress.latest |= accuracies
        self.progress.at_end |= {task: accuracies[task] for task in ended}
        self.recorder.evaluation(step, ended, accuracies)

    def _confusions(self, tasks: list[str]) -> dict[str, NDArray[np.int64]]:
        return confusions(self.learner, {task: self.problem.tests[task] for task in tasks})

    def _save_if_due(self, stop: bool) -> None:
        if not stop and time.monotonic() - self._saved_at < self.settings.checkpoint_seconds:
            return
        self.progress.metrics_position = self.recorder.position()
        self.learner.save(
            self.folder.checkpoint, stream=self.problem.stream, progress=self.progress, origin=self.origin
        )
        self._saved_at = time.monotonic()
        if stop:
            self._show()
            raise InterruptedRunError(
                f"stopped after step {self.learner.steps} of {len(self.problem.stream)} and saved; "
                f"continue with: {shlex.join(['spcl', 'run', '--out', str(self.folder.path), '--resume'])}"
            )

    # -- what is written

    def _record_start(self) -> None:
        configuration = self.problem.configuration
        self.recorder.start(
            scenario=self.settings.scenario,
            tasks=list(self.problem.stream.names),
            label_set=[list(classes) for classes in configuration.label_set],
            timeline=[list(span) for span in configuration.timeline.spans],
        )

    def _result(self) -> dict[str, Any]:
        final, at_end = self.progress.latest, self.progress.at_end
        tables = self.tables or self._confusions(list(final))  # none, where the last step was made before resuming
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
            "confusion": {task: tables[task].tolist() for task in final},
            "filters": self._filters(),
            "left_out": {task.name: task.skipped for task in self.learner.tasks.values() if task.skipped},
            "steps": self.learner.steps,
            "fingerprint": self.origin.data,
            "timeline": [list(span) for span in self.problem.configuration.timeline.spans],
            "environment": _environment(self.device),
            "seconds": {"training": self.progress.trained_seconds},
        }

    def _filters(self) -> dict[str, dict[str, float | None]]:
        """Conditioning, norm and redundancy of the backbone's convolutions (paper, §5.5)."""
        backbone = self.learner.model.backbone
        names = [name for name, layer in backbone.named_modules() if isinstance(layer, torch.nn.Conv2d)]
        statistics = filter_statistics(backbone, names) if names else {}
        return {name: finite(vars(values)) for name, values in statistics.items()}


def _split_method(method: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return method["name"], {name: value for name, value in method.items() if name != "name"}


def _environment(device: torch.device) -> dict[str, Any]:
    return {
        "spcl": spcl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "git": _git_commit(),
    }


@cache
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
def _plain_memory_errors() -> Iterator[None]:
    """A GPU that is full ends in one clear line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        found, _, _ = str(error).partition(". GPU")  # and then who holds how much
        raise OutOfMemoryError(f"{found}; choose a smaller batch_size, or make fewer runs at once (--jobs)") from error


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
