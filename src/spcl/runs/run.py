"""One run, from its settings to ``result.json``: start or resume, train, evaluate, save; its model evaluated again."""

import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl._util.files import write_json
from spcl._util.signals import handling
from spcl.batches import BatchLike, as_batch
from spcl.checkpoint import checked_content, read_newest
from spcl.data import ImageData, SourceData
from spcl.distributed import World
from spcl.engine.ranks import deal
from spcl.errors import CheckpointError, OutOfMemoryError, SpclError, is_out_of_memory
from spcl.learner import Learner, StepReport
from spcl.learner.checks import labelled
from spcl.orthogonality import filter_statistics
from spcl.plugins import load_plugins
from spcl.runs.build import (
    add_source,
    check_given_data,
    is_named_data,
    learner_parts,
    make_heads,
    make_learner,
    make_losses,
    make_problem,
    pick_device,
)
from spcl.runs.presets import resolve_settings, resume_settings
from spcl.runs.records import (
    METRICS,
    DataSummary,
    FolderError,
    MetricsFile,
    Provenance,
    Recorder,
    RunFolder,
    RunResult,
    SilentRecorder,
    TaskResult,
    UnfinishedRunError,
    current_environment,
    fingerprint,
    finite_or_none,
)
from spcl.runs.settings import BOOKKEEPING, RunSettings, decisive_settings, flat_settings, portable_settings
from spcl.runs.trained import TrainedRun, save_model
from spcl.runs.view import SilentView, View
from spcl.streams import Moment
from spcl.tasks import TaskDescription
from spcl.trackers import TRACKERS, Tracker, close_tracker, tracker_errors


def run(
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    view: View | None = None,
    data: ImageData | SourceData | None = None,
) -> RunResult:
    """Train and evaluate one method as ``spcl run`` does, write everything to the folder ``out``, return the result.

    ``settings`` are named as in a settings file; the others have the defaults of the benchmark. ``resume=True``
    continues an interrupted run with its own settings. ``data`` from Python takes the place of the benchmark; ``view``
    shows progress, for example ``spcl.runs.PlainView(rich.console.Console())``. A complete run is not repeated.

    >>> import numpy as np
    >>> from tempfile import TemporaryDirectory
    >>> from spcl.data import from_arrays
    >>> x = np.eye(4, dtype=np.float32).repeat(20, axis=0)
    >>> with TemporaryDirectory() as folder:
    ...     result = run({"method": "er", "device": "cpu"}, out=folder, data=from_arrays(x, x.argmax(axis=1)))
    >>> sorted(result.tasks)
    ['task-0', 'task-1']
    """
    if not resume:
        return execute(resolve_settings(settings or {}, data=data), out, view=view, data=data)
    if settings:
        found = ", ".join(sorted(settings))
        raise SpclError(f"resume=True continues the run in {out} with its own settings; give no others (found {found})")
    return execute(resume_settings(out, data), out, resume=True, view=view, data=data)


def execute(
    settings: RunSettings,
    out: str | Path,
    *,
    resume: bool = False,
    view: View | None = None,
    trackers: Sequence[Tracker] = (),
    data: ImageData | SourceData | None = None,
    distributed: World | None = None,
) -> RunResult:
    """Train and evaluate as the settings say, write everything to the folder ``out`` and return the result.

    The run can be interrupted after every step and resumed exactly. A complete run is not repeated.

    ``data`` from Python replaces the data that the settings name: make the settings by ``resolve_settings(…,
    data=data)``, and pass the same data to resume.

    With ``distributed``, the ranks of ``spcl.distributed.join_world()``, all of them make this call with the same
    settings and data, share the work of every step, and return the result; the first one writes. Where the settings
    leave CPU threads open, every rank has one.

    Raises:
        UnfinishedRunError: if the folder holds an unfinished run and ``resume`` is false.
        FolderError: if the folder holds a run with other settings, or an unfinished run of other data.
        InterruptedRunError: if SIGINT or SIGTERM stopped the run after it was saved.
    """
    load_plugins(settings.plugins)
    check_given_data(settings, data)
    if distributed is not None:
        settings = settings.model_copy(update={"threads": settings.threads or 1})
        distributed.check_same("settings", _common_settings(settings))
    with ExitStack() as opened, _memory_errors():
        prepare = partial(_prepare, settings, folder := RunFolder(Path(out)), resume, opened)
        result = prepare() if distributed is None else distributed.from_first(prepare)
        if result is not None:
            return result
        if distributed is not None and not distributed.is_first:
            return TrainingRun(settings, folder, SilentView(), [], data, distributed).complete()
        return TrainingRun(settings, folder, view or SilentView(), trackers, data, distributed).complete()


def _common_settings(settings: RunSettings) -> dict[str, Any]:
    """Return what must be the same on all ranks: all settings, but files by name alone, since machines may differ."""
    content = settings.model_dump(mode="json")
    return decisive_settings(content) | {name: content[name] for name in BOOKKEEPING - {"data_dir"}}


def _prepare(settings: RunSettings, folder: RunFolder, resume: bool, opened: ExitStack) -> RunResult | None:
    """Lock the folder; return the result of a complete run, or refuse a run that does not belong there."""
    opened.enter_context(folder.locked())
    result, begun = folder.read_result(), folder.has_checkpoint()
    if begun and result is None and not resume:
        raise UnfinishedRunError(f"{folder.path} holds an unfinished run; resume it, or choose another folder")
    if begun or result is not None:
        folder.check_settings(settings)
    return result


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raise any library's out-of-memory error as a one-line :class:`OutOfMemoryError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason, _, _ = str(error).partition(". GPU")  # PyTorch appends the memory of every process
        raise OutOfMemoryError(f"{reason}; choose a smaller batch_size, or make fewer runs at once") from error


class InterruptedRunError(SpclError):
    """A run that was stopped by a signal and saved; resuming continues it exactly."""


@dataclass
class Progress:
    """The state of a run apart from its learner and stream.

    Attributes:
        at_end: the score of every source when it ended.
        latest: the last score of every source.
        anytime: the mean, over the steps up to the last evaluation of all sources seen, of their mean score.
        first: the score of every source on its first batch, before it was trained on, where batches are tested first.
        predicted: by source, the sum of the scores of samples before they were trained on.
        counted: by source, the number of these samples.
        evaluated_steps: the number of these steps.
        trained_seconds: the time spent in training.
        metrics_position: the length of the metrics file.
    """

    at_end: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    anytime: float = 0.0
    evaluated_steps: int = 0
    trained_seconds: float = 0.0
    metrics_position: int = 0

    def evaluated(self, step: int, score: float) -> None:
        """Add an evaluation of all sources seen, after this many steps: it stands for the steps since the last one."""
        self.anytime += (score - self.anytime) * (step - self.evaluated_steps) / step
        self.evaluated_steps = step

    def tested(self, source: str, score: float, samples: int, is_first: bool) -> None:
        """Add the score of a batch before it is trained on."""
        if is_first:
            self.first[source] = score
        self.predicted[source] = self.predicted.get(source, 0.0) + score * samples
        self.counted[source] = self.counted.get(source, 0.0) + samples

    @property
    def prequential(self) -> dict[str, float]:
        """The mean score of every source's samples before they were trained on."""
        return {source: total / self.counted[source] for source, total in self.predicted.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        for name, value in state.items():
            scores = value.values() if isinstance(value, dict) else ()
            if type(value) is not type(getattr(self, name)) or not all(isinstance(score, float) for score in scores):
                raise CheckpointError(f"the progress of the run has {name} = {value!r:.80}; use another checkpoint")
        vars(self).update({"anytime": nan} | dict(state))  # checkpoints of earlier versions have no evaluations


class TrainingRun:
    """One run in a folder that the caller has locked, new or resumed from the folder's checkpoint.

    Args:
        settings: its settings.
        folder: its folder.
        view: receives its progress.
        trackers: receive its metrics, besides the trackers that the settings name.
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
        self.trackers = [*trackers, *self._make_trackers()]
        if self.writes and (saved is None or not folder.settings.exists()):  # nothing is left of a run refused so far
            write_json(folder.settings, portable_settings(settings, folder.path))
        self.recorder = self._make_recorder()
        self._saved_at = time.monotonic()
        self._began = 0.0

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

    def _make_trackers(self) -> list[Tracker]:
        options = flat_settings(self.settings.model_dump(mode="json"))
        chosen = self.settings.trackers if self.writes else ()
        return [TRACKERS.make(tracker, self.folder.path, options) for tracker in chosen]

    def _make_recorder(self) -> Recorder | SilentRecorder:
        if not self.writes:
            return SilentRecorder()
        return Recorder(MetricsFile(self.folder.metrics, self.progress.metrics_position), self.trackers)

    def _resume(self, saved: Mapping[str, Any]) -> Learner:
        with checked_content(self.folder.checkpoint):
            if provenance := saved.get("sources", {}).get("origin"):  # checkpoints of early versions have none
                self.provenance.load_state_dict(provenance)
            tasks = [self.problem.tasks[task["name"]] for task in saved["tasks"]]
        parts = learner_parts(self.settings, self.problem.data, self.device, len(self.problem.stream))
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
        stream = self.problem.stream
        with stop_requested() as stop:

            def moments() -> Iterator[Moment]:
                for moment in stream:
                    self._began = time.perf_counter()
                    yield moment

            def on_moment(moment: Any, report: StepReport | None) -> None:
                assert report is not None, "every moment of a run has a batch"
                self.progress.trained_seconds += time.perf_counter() - self._began
                self._record(moment, report)
                self._evaluate_if_due(moment, report)
                self.view.step(moment.step, report, self.progress.latest)
                self._save_if_due(self._is_any(stop.is_set()))

            self.learner.fit(
                moments(),
                on_start=lambda name: add_source(self.learner, name, self.problem, self.settings),
                before_step=self._before_step,
                on_moment=on_moment,
                meanwhile=stream.prefetch,
            )

    def _is_any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank: a signal reaches them between different steps."""
        return condition if self.distributed is None else self.distributed.any(condition)

    def _before_step(self, batches: Mapping[str, BatchLike]) -> None:
        if self.learner.steps == self.settings.unfreeze_after:
            self.learner.unfreeze()
        if self.settings.prequential:
            for name, batch in batches.items():
                self._test(name, batch)

    def _test(self, name: str, batch: BatchLike) -> None:
        """Score a batch that is not trained on yet; in per cent of a classifier, else the loss."""
        source, model = self.learner.sources[name], self.learner.model
        heads = model.classifiers if model.scenario == "class" else [source.task]
        if source.task.signature is None or any(task.head is None for task in heads):
            return  # nothing is known of this task
        is_classifier = source.task.classes is not None
        x, y = labelled(*as_batch(batch))
        if samples := len(y):
            score = self.learner.evaluate([(x, y)], source=name) * (100.0 if is_classifier else 1.0)
            self.progress.tested(name, score, samples, is_first=source.signature is None)

    def _record(self, moment: Moment, report: StepReport) -> None:
        if report.step % self.settings.record_every == 0 or report.skipped:
            self.recorder.step(moment.step, report)

    def _is_last_step(self) -> bool:
        return self.learner.steps == len(self.problem.stream)

    # -- evaluate

    def _evaluate_if_due(self, moment: Moment, report: StepReport) -> None:
        if sources := self._sources_to_evaluate(moment, report):
            accuracies, self.tables = self._evaluation({name: self.problem.tests[name] for name in sources})
            self.progress.latest |= accuracies
            if accuracies.keys() == self.learner.sources.keys():
                self.progress.evaluated(self.learner.steps, average_accuracy(accuracies))
            self.progress.at_end |= {source: accuracies[source] for source in moment.ended}
            self.recorder.evaluation(moment.step, moment.ended, accuracies)

    def _sources_to_evaluate(self, moment: Moment, report: StepReport) -> list[str]:
        every = self.settings.evaluate_every
        if moment.ended and self.settings.evaluate == "ended" and not self._is_last_step():
            return list(moment.ended)
        due = moment.ended or self._is_last_step() or (every is not None and (report.step + 1) % every == 0)
        return list(self.learner.sources) if due else []

    def _evaluation(self, tests: "Tests") -> "Evaluation":
        if self.distributed is None:
            return evaluate(self.learner, tests, self.problem.asked)
        return evaluate_on_ranks(self.distributed, self.learner, tests, self.problem.asked)

    # -- save

    def _save_if_due(self, stop: bool) -> None:
        if not stop and time.monotonic() - self._saved_at < self.settings.checkpoint_seconds:
            return
        self.progress.metrics_position = self.recorder.sync()
        self.learner.save(
            self.folder.checkpoint,
            keep=self.settings.keep_checkpoints,
            stream=self.problem.stream,
            progress=self.progress,
            origin=self.provenance,
        )
        self._saved_at = time.monotonic()
        if stop:
            steps = f"{self.learner.steps} of {len(self.problem.stream)}"
            raise InterruptedRunError(f"stopped after step {steps} and saved")

    # -- result

    def _write(self, result: RunResult) -> None:
        if self.settings.keep_model:
            save_model(self.folder, self.learner, self.problem.tasks.values(), self.problem.inputs)
        write_json(self.folder.result, result.model_dump(mode="json"))
        for tracker in self.trackers:
            with tracker_errors(tracker):
                tracker.result(result.measures)
        self.folder.remove_checkpoints()

    def _result(self) -> RunResult:
        final, at_end = self.progress.latest, self.progress.at_end
        tables = self.tables  # empty when resumed after the last step
        if not tables:
            tables = self._evaluation({name: self.problem.tests[name] for name in final}).tables
        asked = self.problem.asked
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
            anytime=self._anytime(),
            tasks={
                name: TaskResult(at_end=at_end[name], final=final[name], metric=METRICS[asked[name].kind])
                for name in final
            },
            task_of=dict(self.problem.task_of) if self.problem.shares_tasks else {},
            unseen=self._evaluation(self.problem.unseen).scores if self.problem.unseen else {},
            prequential=self.progress.prequential,
            first=self.progress.first,
            confusion={name: tables[name].tolist() for name in final if name in tables},
            class_names={name: names for name in final if (names := asked[name].class_names)},
            filters=convolution_statistics(self.learner.model.backbone),
            left_out={each.name: each.skipped for each in self.learner.sources.values() if each.skipped},
            steps=self.learner.steps,
            fingerprint=self.provenance.fingerprint,
            timeline=self.problem.configuration.timeline.spans,
            environment=current_environment(self.device, self.distributed),
            seconds={"training": self.progress.trained_seconds},
        )

    def _anytime(self) -> float | None:
        """Return the anytime score, or None where only single tasks were evaluated before the end."""
        only_single = self.settings.evaluate == "ended" and self.settings.evaluate_every is None
        return None if only_single or not isfinite(self.progress.anytime) else self.progress.anytime


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; the second raises KeyboardInterrupt."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with handling((signal.SIGINT, signal.SIGTERM), handle):
        yield stop


# -- scores


Tests = Mapping[str, tuple[Any, Tensor]]
"""Inputs and targets of every source."""

AskedOf = Mapping[str, TaskDescription]
"""What every source is asked."""


class Evaluation(NamedTuple):
    """The score of every source in per cent, and the confusion tables of the classifications."""

    scores: dict[str, float]
    tables: dict[str, NDArray[np.int64]]


def evaluate(learner: Learner, tests: Tests, asked: AskedOf) -> Evaluation:
    """Evaluate sources by the metric of their task's kind: accuracy, R² or F1, all in per cent."""
    kinds = {name: asked[name].kind for name in tests}
    tables = confusions(learner, {name: test for name, test in tests.items() if kinds[name] == "classification"}, asked)
    scores = {}
    for name, (x, y) in tests.items():
        if name in tables:
            scores[name] = confusion_accuracy(learner, asked[name].name, tables[name])
        else:
            output = _logits(learner, name, asked[name].name, x).cpu()  # NaN, too, where training has diverged
            scores[name] = 100.0 * (r_squared if kinds[name] == "regression" else f1_score)(output, y)
    return Evaluation(scores, tables)


def _logits(learner: Learner, source: str, task: str, x: Any) -> Tensor:
    """Return the scores for samples of a source; one that was never trained has no encoder of its own."""
    if source in learner.sources:
        return learner.logits(x, source=source)
    return learner.logits(x, task=None if learner.scenario == "class" else task)


def evaluate_on_ranks(world: World, learner: Learner, tests: Tests, asked: AskedOf) -> Evaluation:
    """Evaluate as :func:`evaluate` does, each rank a part of the sources; every rank gets all scores."""
    names = list(tests)
    block = deal([len(y) for _, y in tests.values()], world.size)[world.rank]
    parts = world.gather_objects(evaluate(learner, {names[index]: tests[names[index]] for index in block}, asked))
    scores = {name: score for part in parts for name, score in part.scores.items()}
    return Evaluation(scores, {name: table for part in parts for name, table in part.tables.items()})


def r_squared(output: Tensor, targets: Tensor) -> float:
    r"""Compute :math:`R^2 = 1 - \sum_{ij} (y_{ij} - o_{ij})^2 / \sum_{ij} (y_{ij} - \bar y_j)^2`.

    It is 1 for perfect predictions and 0 for predictions that always give the mean of each target.

    >>> targets = torch.tensor([[1.0], [2.0], [3.0]])
    >>> r_squared(targets, targets), r_squared(torch.full((3, 1), 2.0), targets)
    (1.0, 0.0)
    """
    output, targets = output.double(), targets.double()
    return 1.0 - float((targets - output).square().sum() / (targets - targets.mean(dim=0)).square().sum())


def f1_score(logits: Tensor, targets: Tensor) -> float:
    """Compute the micro-averaged F1, 2·TP / (2·TP + FP + FN), of all labels; a logit above 0 predicts its label.

    It is 1 where there is no label, neither in the targets nor predicted.

    >>> f1_score(torch.tensor([[2.0, -1.0], [0.5, -3.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    0.8
    """
    predicted, present = logits > 0, targets > 0
    hits, errors = int((predicted & present).sum()), int((predicted ^ present).sum())
    return 2 * hits / (2 * hits + errors) if hits or errors else 1.0


def confusions(learner: Learner, tests: Tests, asked: AskedOf) -> dict[str, NDArray[np.int64]]:
    """Count for every source how often each class of its task (rows) was predicted as each class (columns).

    The columns are the task's own classes or, class-incremental, all classes seen.
    """
    if not tests:
        return {}
    logits = (_logits(learner, name, asked[name].name, x) for name, (x, _) in tests.items())
    predicted = [each.argmax(dim=1) for each in logits]
    on_host = torch.split(torch.cat(predicted).cpu(), [len(labels) for labels in predicted])  # waits for a GPU once
    pairs = zip(tests.items(), on_host, strict=True)
    return {name: _confusion(learner, asked[name].name, y, labels) for (name, (_, y)), labels in pairs}


def confusion_accuracy(learner: Learner, task: str, table: NDArray[np.int64]) -> float:
    """Compute the accuracy of a confusion table, in per cent."""
    offset = learner.tasks[task].offset if learner.scenario == "class" else 0
    return 100.0 * float(np.trace(table[:, offset:])) / float(table.sum())


def average_accuracy(final: Mapping[str, float]) -> float:
    r"""Compute :math:`A = \frac1T \sum_t a_{\bar e}^t`, the mean over sources of the score at the end of the run.

    >>> average_accuracy({"a": 80.0, "b": 60.0})
    70.0
    """
    return float(np.mean(list(final.values())))


def forgetting(final: Mapping[str, float], at_end: Mapping[str, float]) -> float:
    r"""Compute :math:`F = \frac1T \sum_t (a_{\bar e}^t - a_{e_t}^t)`, the mean change since each source ended.

    >>> forgetting({"a": 80.0, "b": 60.0}, {"a": 90.0, "b": 60.0})
    -5.0
    """
    return float(np.mean([final[task] - at_end[task] for task in final]))


def convolution_statistics(backbone: nn.Module) -> dict[str, dict[str, float | None]]:
    """Compute conditioning, norm and redundancy of the filters of every convolution, by layer name."""
    names = [name for name, layer in backbone.named_modules() if isinstance(layer, nn.Conv2d)]
    statistics = filter_statistics(backbone, names) if names else {}
    return {name: finite_or_none(vars(values)) for name, values in statistics.items()}


def _confusion(learner: Learner, task: str, y: Tensor, predicted: Tensor) -> NDArray[np.int64]:
    classes = learner.tasks[task].classes or 0
    columns = len(learner.classes) if learner.scenario == "class" else classes
    return torch.bincount(y * columns + predicted, minlength=classes * columns).view(classes, columns).numpy()


# -- a saved model beside what its run recorded


ROUNDING = 0.01


@dataclass(frozen=True)
class Reevaluation:
    """The scores of every source in per cent, their metrics, and their mean A: as recorded and now.

    Attributes:
        metrics: what score it is, by source.
        recorded: the score in the record.
        now: the score now.
        unseen: the sources that were never trained, which are no part of A.
    """

    metrics: Mapping[str, str]
    recorded: Mapping[str, float]
    now: Mapping[str, float]
    unseen: frozenset[str] = frozenset()

    @property
    def averages(self) -> tuple[float, float]:
        """A as recorded and now."""
        trained = [source for source in self.recorded if source not in self.unseen]
        recorded, now = ({source: scores[source] for source in trained} for scores in (self.recorded, self.now))
        return average_accuracy(recorded), average_accuracy(now)

    @property
    def difference(self) -> float:
        """The largest difference of a task's score.

        >>> Reevaluation({"a": "accuracy", "b": "accuracy"}, {"a": 80.0, "b": 60.0}, {"a": 80.0, "b": 59.5}).difference
        0.5
        """
        return max(abs(self.now[task] - score) for task, score in self.recorded.items())


def evaluate_run(
    run: TrainedRun,
    device: str = "auto",
    data_dir: str | None = None,
    data: ImageData | SourceData | None = None,
    benchmark: str | None = None,
) -> Reevaluation:
    """Load data and model of a run, and evaluate every source on the test data as the run did, unseen ones included.

    A warning is given if scores differ by more than rounding, or if the data has changed.

    Args:
        run: the run.
        device: ``cpu``, ``cuda``, …; ``auto`` is a GPU if there is one.
        data_dir: where the publishers' files are, if not where they were.
        data: the data of a run that was made with data from Python.
        benchmark: name or path of the data, if it is not where it was.
    """
    if run.result is None:
        raise FolderError(f"the service of {run.path} has no test data; give the folder of a run")
    given = {"data_dir": data_dir, "benchmark": benchmark}
    settings = run.settings.model_copy(update={name: value for name, value in given.items() if value is not None})
    if data is None and not is_named_data(settings.benchmark):
        raise FolderError(
            f"the data {settings.benchmark!r} of the run in {run.path} came from Python; evaluate it there, with "
            f"evaluate_run(read_run(path), data=…), or give the path of the same data as benchmark"
        )
    chosen = pick_device(device)
    problem = make_problem(settings, chosen, data)
    learner = run.learner(device)
    recorded = {source: result.final for source, result in run.result.tasks.items()} | run.result.unseen
    tests = problem.tests | problem.unseen
    now = evaluate(learner, {name: tests[name] for name in recorded}, problem.asked).scores
    metrics = {name: METRICS[task.kind] for name, task in problem.asked.items() if name in now}
    outcome = Reevaluation(metrics, recorded, now, frozenset(run.result.unseen))
    if run.result.fingerprint not in (None, fingerprint(problem.data)):
        warnings.warn(f"the data of {settings.benchmark} has changed since the run was made", stacklevel=2)
    elif outcome.difference > ROUNDING:
        warnings.warn(
            f"scores differ by up to {outcome.difference:.2f} from the recorded ones on the same data; another "
            f"device or version of PyTorch can change the class of a few samples",
            stacklevel=2,
        )
    return outcome
