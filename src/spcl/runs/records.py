"""The folder of a run and its files: settings, metrics while it trains, and the result of the complete run."""

import json
import os
import platform
import re
import subprocess
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)
from torch import Tensor

import spcl
from spcl._util.files import locked, read_json, remove_partial_files, user_errors
from spcl._util.registry import installed_plugins
from spcl.batches import Inputs, leaves
from spcl.checkpoint import has_checkpoint, remove_checkpoint
from spcl.data import ImageData, SourceData, SourceSamples
from spcl.distributed import World
from spcl.errors import SpclError
from spcl.learner import StepReport
from spcl.runs.settings import RECORD_NAME, RunSettings, first_difference, resolved_paths, with_defaults
from spcl.stability import Stability, summaries
from spcl.tasks import Kind
from spcl.trackers import Tracker, tracker_errors

# -- result.json


Metric = Literal["accuracy", "R²", "F1"]
"""The score of a task, in per cent: accuracy, 100·R² or micro-averaged F1."""

METRICS: dict[Kind, Metric] = {"classification": "accuracy", "regression": "R²", "multilabel": "F1"}
"""The score of each kind of task."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class DataSummary(_Record):
    """The data of a run: its name, the number of samples, their shape and the number of classes.

    The shape is empty for several sources whose samples differ in shape.
    """

    name: str
    train: int
    test: int
    shape: tuple[int, ...]
    classes: int

    @classmethod
    def of(cls, data: ImageData | SourceData) -> Self:
        """Summarise a data set.

        >>> import torch
        >>> images, labels = torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
        >>> print(DataSummary.of(ImageData("tiny", images, labels, images[:2], labels[:2], ("zero", "one"))))
        tiny: 4 + 2 samples of 1×28×28, 2 classes
        """
        return cls(
            name=data.name,
            train=data.train_samples,
            test=data.test_samples,
            shape=data.shape,
            classes=data.classes,
        )

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """Return the summary of the text that earlier versions wrote; None for any other text."""
        pattern = r"\w+\(['\"](.*)['\"]: (\d+) \+ (\d+) samples of ([\d×]+), (\d+) classes\)"
        if (found := re.fullmatch(pattern, text)) is None:
            return None
        name, train, test, shape, classes = found.groups()
        sizes = tuple(map(int, shape.split("×")))
        return cls(name=name, train=int(train), test=int(test), shape=sizes, classes=int(classes))

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "several shapes"
        return f"{self.name}: {self.train} + {self.test} samples of {shape}, {self.classes} classes"


class TaskResult(_Record):
    """The score of a task in per cent, when it ended and at the end of the run, and what score it is."""

    at_end: float = Field(strict=True)  # accepts no text and no boolean
    final: float = Field(strict=True)
    metric: Metric = "accuracy"

    @model_serializer(mode="wrap")
    def _without_accuracy(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Name the metric only where it is not accuracy, as in records of earlier versions."""
        content: dict[str, Any] = serialise(self)
        return content if self.metric != "accuracy" else {name: content[name] for name in content if name != "metric"}


class Environment(_Record):
    """Versions and hardware that a run was made with.

    ``plugins`` are the installed packages that added plug-ins by entry points, with their versions; ``ranks`` is the
    number of processes that made the run together, ``split`` what they split, e.g. ``2x4``.

    >>> Environment(spcl="1.0", plugins={"my-things": "0.3"}).model_dump(exclude_none=True)
    {'spcl': '1.0', 'plugins': {'my-things': '0.3'}}
    """

    spcl: str | None = None
    torch: str | None = None
    python: str | None = None
    device: str | None = None
    threads: int | None = None
    git: str | None = None
    plugins: dict[str, str] = Field(default_factory=dict)
    ranks: int = 1
    split: str | None = None

    @model_serializer(mode="wrap")
    def _without_no_plugins(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Name plug-ins and the number of ranks only where there are any, as in records of earlier versions."""
        content: dict[str, Any] = serialise(self)
        unused = [*["plugins"] * (not self.plugins), *["ranks", "split"] * (self.ranks == 1)]
        return {name: value for name, value in content.items() if name not in unused}


class RunResult(_Record):
    """The result of a complete run; accuracies (or other scores) and forgetting are in per cent.

    Attributes:
        accuracy: A, the mean final accuracy of all tasks.
        forgetting: F, the mean over tasks of the final accuracy minus the accuracy when the task ended.
        anytime: the mean over the steps of the run of the mean accuracy of the tasks seen so far; every evaluation of
            these tasks stands for the steps since the one before. None where tasks were evaluated only one by one.
        tasks: the final accuracy of every source, and the accuracy when it ended; 100·R² of regressions, F1 of labels.
            Where sources are tasks, of every task.
        task_of: the task of every source, unseen ones included, where sources share tasks; else empty.
        unseen: the final score of every source that was never trained.
        prequential: by source, the mean score of samples before they were trained on, in per cent of a classifier, else
            the loss; empty unless batches were tested first.
        first: likewise the score of the first batch of every source of a task that was known: forward transfer.
        data: name and size of the data.
        fingerprint: checksum of the data.
        confusion: for every classification how often each of its classes (rows) was predicted as each class (columns).
        class_names: the names of the classes or outputs of every task that has names.
        filters: statistics of the filters of every convolution (paper, §5.5); None where they are not finite.
        left_out: (a key of existing files) steps in which a task was skipped because its loss or gradient was not
            finite.
        steps: the number of training steps.
        timeline: the first and last step of every task.
        environment: versions and hardware.
        seconds: the time of every phase.

    Fields that records of earlier versions lack are empty.

    >>> result = RunResult.parse({"accuracy": 80.0, "forgetting": -5.0, "tasks": {"a": {"at_end": 85, "final": 80}}})
    >>> result.tasks["a"].final
    80.0
    >>> RunResult.parse({"accuracy": 80.0})
    """

    scenario: str | None = None
    benchmark: str | None = None
    data: DataSummary | None = None
    method: str | None = None
    preset: str | None = None
    config: int | None = None
    seed: int | None = None
    accuracy: float = Field(strict=True)
    forgetting: float = Field(strict=True)
    anytime: float | None = None
    tasks: dict[str, TaskResult]
    task_of: dict[str, str] = Field(default_factory=dict)
    unseen: dict[str, float] = Field(default_factory=dict)
    prequential: dict[str, float] = Field(default_factory=dict)
    first: dict[str, float] = Field(default_factory=dict)
    confusion: dict[str, list[list[int]]] = Field(default_factory=dict)
    class_names: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    filters: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    left_out: dict[str, int] = Field(default_factory=dict)
    steps: int | None = None
    fingerprint: str | None = None
    timeline: tuple[tuple[int, int], ...] = ()
    environment: Environment | None = None
    seconds: dict[str, float] = Field(default_factory=dict)

    @property
    def measure(self) -> str:
        """The noun for A: accuracy, or score where a task has another metric.

        >>> tasks = {"speed": {"at_end": 75.0, "final": 70.0, "metric": "R²"}}
        >>> RunResult(accuracy=70.0, forgetting=-5.0, tasks=tasks).measure
        'score'
        """
        return "accuracy" if all(task.metric == "accuracy" for task in self.tasks.values()) else "score"

    @property
    def summary(self) -> str:
        """A, the anytime score if there is one, and F as text.

        >>> RunResult(accuracy=70.0, forgetting=-5.0, tasks={}).summary
        'accuracy 70.00 %, F -5.00 %'
        """
        anytime = "" if self.anytime is None else f", anytime {self.anytime:.2f} %"
        unseen = "" if self.unseen_accuracy is None else f", unseen sources {self.unseen_accuracy:.2f} %"
        return f"{self.measure} {self.accuracy:.2f} %{anytime}, F {self.forgetting:+.2f} %{unseen}"

    @property
    def at_end(self) -> float:
        """The mean over sources of the score when each ended.

        >>> tasks = {"a": {"at_end": 85.0, "final": 80.0}, "b": {"at_end": 75.0, "final": 60.0}}
        >>> result = RunResult(accuracy=70.0, forgetting=-10.0, tasks=tasks)
        >>> result.at_end, result.worst
        (80.0, 60.0)
        """
        return fmean(task.at_end for task in self.tasks.values())

    @property
    def worst(self) -> float:
        """The final score of the source with the lowest."""
        return min(task.final for task in self.tasks.values())

    @property
    def unseen_accuracy(self) -> float | None:
        """The mean final score of the sources that were never trained; None if there are none."""
        return fmean(self.unseen.values()) if self.unseen else None

    @property
    def prequential_accuracy(self) -> float | None:
        """The mean over classified sources of their accuracy before training, test then train; None if not measured."""
        return self._mean_of_classified(self.prequential)

    @property
    def transfer(self) -> float | None:
        """The mean accuracy of classified sources on their first batch, before training on it; None if not measured."""
        return self._mean_of_classified(self.first)

    def _mean_of_classified(self, scores: Mapping[str, float]) -> float | None:
        """Return the mean of scores that are accuracies; others are losses, each of an own scale."""
        accuracies = [score for name, score in scores.items() if self.tasks[name].metric == "accuracy"]
        return fmean(accuracies) if accuracies else None

    @property
    def by_task(self) -> dict[str, TaskResult]:
        """The mean scores of the sources of every task, where sources share tasks and there are several; else empty.

        >>> tasks = {"anna": {"at_end": 85.0, "final": 80.0}, "ben": {"at_end": 75.0, "final": 60.0}}
        >>> task_of = {"anna": "activity", "ben": "place"}
        >>> RunResult(accuracy=70.0, forgetting=-10.0, tasks=tasks, task_of=task_of).by_task["place"]
        TaskResult(at_end=75.0, final=60.0, metric='accuracy')
        """
        members: dict[str, list[TaskResult]] = {}
        for source, result in self.tasks.items() if self.task_of else ():
            members.setdefault(self.task_of[source], []).append(result)
        return (
            {}
            if len(members) < 2
            else {
                task: TaskResult(
                    at_end=fmean(each.at_end for each in results),
                    final=fmean(each.final for each in results),
                    metric=results[0].metric,
                )
                for task, results in members.items()
            }
        )

    @property
    def measures(self) -> dict[str, float]:
        """A, F and the other measures of the run by short names, in per cent; A and F of every task, too."""
        of_tasks = {f"A of {task}": result.final for task, result in self.by_task.items()}
        of_tasks |= {f"F of {task}": result.final - result.at_end for task, result in self.by_task.items()}
        anytime = {} if self.anytime is None else {"anytime": self.anytime}
        others = {SOURCE_MEASURES[name].short: value for name, value in self.of_sources.items()}
        return {"A": self.accuracy, "F": self.forgetting} | anytime | others | of_tasks

    @property
    def of_sources(self) -> dict[str, float]:
        """The measures of :data:`SOURCE_MEASURES` that the run has, in per cent.

        They are measures beside A and F of runs with sources that share tasks or are unseen, or that tested batches
        first.

        >>> tasks = {"anna": {"at_end": 85.0, "final": 80.0}, "ben": {"at_end": 75.0, "final": 60.0}}
        >>> RunResult(accuracy=70.0, forgetting=-10.0, tasks=tasks, unseen={"eve": 55.0}).of_sources
        {'at_end': 80.0, 'worst': 60.0, 'unseen_accuracy': 55.0}
        >>> RunResult(accuracy=70.0, forgetting=-10.0, tasks=tasks).of_sources
        {}
        """
        if not (self.task_of or self.unseen or self.prequential):
            return {}
        values = {name: getattr(self, name) for name in SOURCE_MEASURES}
        return {name: value for name, value in values.items() if value is not None}

    @field_validator("data", mode="before")
    @classmethod
    def _data_of_earlier_versions(cls, value: Any) -> Any:
        return DataSummary.from_text(value) if isinstance(value, str) else value

    @classmethod
    def parse(cls, content: Any) -> Self | None:
        """Return the result that decoded JSON holds, or None where it holds none."""
        try:
            return cls.model_validate(content)
        except ValidationError:
            return None


class SourceMeasure(NamedTuple):
    """A measure of sources: a short name, one that says what is measured, and what it means.

    Braces stand for the noun for A, see :attr:`RunResult.measure`.
    """

    short: str
    title: str
    meaning: str

    @property
    def heading(self) -> str:
        """The heading of a column of a table."""
        return f"{self.short} A %"


SOURCE_MEASURES = {
    "at_end": SourceMeasure("at end", "{} at the end of each source", "the mean {} of each source when it ended"),
    "worst": SourceMeasure("worst", "worst source", "the final {} of the source with the lowest"),
    "unseen_accuracy": SourceMeasure(
        "unseen", "unseen sources", "the mean final {} of the sources that were never trained"
    ),
    "prequential_accuracy": SourceMeasure(
        "prequential", "prequential", "the mean accuracy of samples before they were trained on"
    ),
    "transfer": SourceMeasure(
        "first batch", "first batch", "the mean accuracy on a source's first batch, before training on it"
    ),
}
"""Measures of runs with several sources, by the attribute of a result that holds their value."""


def common_measure(results: Iterable[RunResult | None]) -> str:
    """Return the noun for A in a table of these results: accuracy, or score where some have other metrics."""
    return "score" if any(result is not None and result.measure == "score" for result in results) else "accuracy"


# -- the folder


class FolderError(SpclError):
    """A folder that cannot take the run: it holds another one, or data or settings have changed since."""


class FolderInUseError(FolderError):
    """A folder that another process writes to."""


class UnfinishedRunError(FolderError):
    """A folder that holds an unfinished run, which only resuming may continue."""


class RunFolder:
    """The files of one run.

    They are ``settings.json``, ``metrics.jsonl``, ``checkpoint.safetensors`` until the run is complete, and then
    ``model.safetensors`` and ``result.json``; and ``bundle.json`` of a run that came as an archive.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.settings = path / RECORD_NAME
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.checkpoint = path / "checkpoint.safetensors"
        self.model = path / "model.safetensors"
        self.bundle = path / "bundle.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it against other processes; the lock ends with the process at the latest.

        A new folder that nothing was written to is removed again.
        """
        with user_errors(self.path):
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(lock := self.path / ".lock") as is_ours:
                if not is_ours:
                    raise FolderInUseError(
                        f"another process is running in {self.path}; wait for it, or choose another folder"
                    )
                remove_partial_files(self.path)
                try:
                    yield
                finally:
                    if is_new and [*self.path.iterdir()] == [lock]:
                        with suppress(OSError):  # some systems keep open files
                            lock.unlink()
                            self.path.rmdir()

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return has_checkpoint(self.checkpoint)

    def remove_checkpoints(self) -> None:
        """Remove the checkpoint, the previous ones, and unfinished files of killed writers."""
        remove_checkpoint(self.checkpoint)

    def read_result(self) -> RunResult | None:
        """Return the result, or None where it is missing or damaged."""
        return RunResult.parse(read_json(self.result))

    def read_settings(self) -> dict[str, Any] | None:
        """Return the recorded settings with absolute paths, or None where they are missing or damaged."""
        content = read_json(self.settings)
        return resolved_paths(content, self.path) if isinstance(content, dict) else None

    def check_settings(self, settings: RunSettings) -> None:
        """Raise :class:`FolderError` if the folder holds a run with other settings."""
        recorded = self.read_settings()
        if recorded is None:
            return
        if found := first_difference(with_defaults(recorded), settings.model_dump(mode="json")):
            name, recorded, requested = found
            raise FolderError(
                f"{self.path} holds a run with {name} = {recorded}, not {requested}; "
                f"choose another folder, or remove this one"
            )


# -- metrics.jsonl


WRITE_SECONDS = 1.0


class MetricsFile:
    """One JSON object per line, appended.

    ``position`` is the length of the file when the run was saved; everything after it is removed.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        with path.open("ab") as file:
            if file.tell() < position:
                raise FolderError(
                    f"{path} has {file.tell()} bytes, but had {position} when the run was saved; put the file back, or "
                    f"start again in another folder"
                )
            file.truncate(position)
        self._file = path.open("a", encoding="utf-8")
        self._encode = json.JSONEncoder(ensure_ascii=False).encode

    def write(self, kind: str, **values: Any) -> None:
        """Append one line."""
        self._file.write(self._encode({"kind": kind, **values}) + "\n")

    def sync(self) -> int:
        """Write everything to the disk and return the length of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


class Recorder:
    """Write the steps and evaluations of a run, in order, to the metrics file and to trackers.

    Steps are collected for a second, since computing the stability of many steps in one batch is much faster.
    """

    def __init__(self, metrics: MetricsFile, trackers: Sequence[Tracker]) -> None:
        self._metrics = metrics
        self._trackers = trackers
        self._unwritten: list[tuple[int, StepReport]] = []
        self._written_at = time.monotonic()

    def start(self, **facts: Any) -> None:
        """Record the scenario, the tasks, their classes and their timeline."""
        self._metrics.write("start", **facts)

    def step(self, step: int, report: StepReport) -> None:
        """Record the losses, weights, gradient norms and stability of a step."""
        self._unwritten.append((step, report))
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._write_steps()

    def evaluation(self, step: int, ended: tuple[str, ...], accuracies: Mapping[str, float]) -> None:
        """Record accuracies in per cent, and the tasks that ended at this step."""
        self._write_steps()
        self._metrics.write("evaluation", step=step, ended=list(ended), accuracy=accuracies)
        for tracker in self._trackers:
            with tracker_errors(tracker):
                tracker.evaluation(step, accuracies)

    def sync(self) -> int:
        """Write everything to the disk and return the length of the metrics file."""
        self._write_steps()
        return self._metrics.sync()

    def close(self) -> None:
        """Write the steps that are left and close the metrics file."""
        try:
            self._write_steps()
        finally:
            self._metrics.close()

    def _write_steps(self) -> None:
        steps, self._unwritten = self._unwritten, []
        for (step, _), values in zip(steps, _step_values([report for _, report in steps]), strict=True):
            self._metrics.write("step", step=step, **values)
            for tracker in self._trackers:
                with tracker_errors(tracker):
                    tracker.step(step, values)
        self._written_at = time.monotonic()


class SilentRecorder:
    """A recorder that writes nothing."""

    def start(self, **facts: Any) -> None:
        """Do nothing."""

    def step(self, step: int, report: StepReport) -> None:
        """Do nothing."""

    def evaluation(self, step: int, ended: tuple[str, ...], accuracies: Mapping[str, float]) -> None:
        """Do nothing."""

    def sync(self) -> int:
        """Return the length of a file without lines."""
        return 0

    def close(self) -> None:
        """Do nothing."""


def finite_or_none(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace infinite and NaN values by None, since JSON has neither.

    >>> finite_or_none({"condition_number": float("inf"), "cosine": 0.5})
    {'condition_number': None, 'cosine': 0.5}
    """
    return {name: value if isfinite(value) else None for name, value in values.items()}


def _step_values(reports: list[StepReport]) -> list[dict[str, Any]]:
    return [
        {
            "losses": report.losses,
            "weights": report.weights,
            **({} if report.before is None else {"norms": _norms(report.losses, report.before)}),
            "before": before,
            "after": after,
            **({"dropped": report.skipped} if report.skipped else {}),
        }
        for report, before, after in zip(
            reports,
            _stability_values([report.before for report in reports]),
            _stability_values([report.after for report in reports]),
            strict=True,
        )
    ]


def _norms(names: Iterable[str], measured: Stability) -> dict[str, float | None]:
    """Return the norm of every gradient, before the weighting."""
    norms = measured.gramian.diagonal().clamp(min=0.0).sqrt().tolist()
    return finite_or_none(dict(zip(names, norms, strict=True)))


def _stability_values(measured: list[Stability | None]) -> list[dict[str, float | None] | None]:
    """Return κ, conflicts and similarities of every step; None where there are fewer than two gradients."""
    gramians = {i: found.gramian for i, found in enumerate(measured) if found is not None and len(found.gramian) > 1}
    values = dict(zip(gramians, summaries(list(gramians.values())), strict=True))
    return [finite_or_none(values[i]._asdict()) if i in values else None for i in range(len(measured))]


# -- what a run was started with


MAX_BYTES = 8 << 20


class Provenance:
    """Settings and data fingerprint of the run in the folder ``out``; checkpoints hold them.

    Attributes:
        fingerprint: the checksum of the data.
    """

    def __init__(self, out: Path, settings: RunSettings, data: ImageData | SourceData) -> None:
        self._out = out
        self._settings = settings.model_dump(mode="json")
        self.fingerprint = fingerprint(data)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and fingerprint."""
        return {"settings": self._settings, "data": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise :class:`FolderError` if the run was saved with other settings or other data."""
        if found := first_difference(with_defaults(state["settings"]), self._settings):
            name, saved, now = found
            raise FolderError(
                f"the run in {self._out} was saved with {name} = {saved}, but its settings.json now says {now}; "
                f"set it back to resume, or start another run in another folder"
            )
        if state["data"] != self.fingerprint:
            raise FolderError(
                f"the data of {self._settings['benchmark']} has changed since the run in {self._out} was saved "
                f"(its fingerprint is {self.fingerprint}, and was {state['data']}); put the data back to resume, "
                f"or start again in another folder"
            )


def fingerprint(data: ImageData | SourceData) -> str:
    """Compute a checksum of all labels and of evenly spaced samples, at most a few megabytes.

    >>> x, y = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])
    >>> one, other = (ImageData("some", x, labels, x, y, ("a", "b")) for labels in (y, 1 - y))
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    checksum = 0
    for part in data.sources if isinstance(data, SourceData) else [data]:
        if isinstance(part, SourceSamples):
            checksum = zlib.crc32(f"{part.name} {part.kind} {part.class_names}".encode(), checksum)
            if part.task is not None or part.unseen:
                checksum = zlib.crc32(f"{part.task} {part.unseen}".encode(), checksum)
        for x, y in ((part.train_x, part.train_y), (part.test_x, part.test_y)):
            checksum = _samples_checksum(x, y, checksum)
    return f"{checksum:08x}"


def _samples_checksum(x: Inputs, y: Tensor, checksum: int) -> int:
    if isinstance(x, dict):
        checksum = zlib.crc32(" ".join(x).encode(), checksum)
    for inputs in leaves(x).values():
        for tensor in (y, inputs[:: 1 + inputs.nbytes // MAX_BYTES]):
            checksum = zlib.crc32(f"{inputs.dtype} {list(inputs.shape)}".encode(), checksum)
            checksum = zlib.crc32(_bytes(tensor), checksum)
    return checksum


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


# -- versions and hardware


def current_environment(device: torch.device, world: World | None = None) -> Environment:
    """Describe versions and hardware of a run on this device, with the number of ranks."""
    return Environment(
        spcl=spcl.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        threads=torch.get_num_threads(),
        git=_git_commit(Path(__file__).parent),
        plugins=installed_plugins(),
        ranks=1 if world is None else world.size,
        split=None if world is None else world.split,
    )


@cache
def _git_commit(folder: Path) -> str | None:
    """Return the commit of a source tree, with "-dirty" if files differ from it, or None outside of one."""
    describe = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    try:
        answer = subprocess.run(["git", "-C", str(folder), *describe], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
