"""Predictions of a trained run for files of samples, as rows of plain data."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from spcl.batches import concatenate, number_of_samples
from spcl.data.progress import track
from spcl.errors import DataError, TaskError
from spcl.learner import Learner
from spcl.models import InputSpec
from spcl.runs.model import TrainedRun
from spcl.runs.samples import SampleFile, Samples, find_files, open_file
from spcl.runs.tasks import RunTask

__all__ = ["Row", "check_task", "predict_files"]

BATCH = 256

Row = dict[str, Any]
"""A prediction for a sample: file, index and task, and then rank, class and probability, or outputs by name."""

Chunk = tuple[SampleFile, int, Samples]
OnError = Callable[[DataError], object]


def check_task(run: TrainedRun, task: str | None) -> InputSpec:
    """Return the inputs of a task, or of all tasks of a class-incremental run; an error lists the tasks."""
    listed = "; ".join(map(_described, run.tasks.values()))
    if task is not None:
        if task not in run.tasks:
            raise TaskError(f"the run in {run.path} has no task {task!r}; its tasks are {listed}")
        return run.inputs[task]
    if run.settings.scenario == "task":
        raise TaskError(f"the run in {run.path} is task-incremental; name the task of the samples, one of {listed}")
    first, *others = run.inputs.values()
    if any((each.shape, each.dtype) != (first.shape, first.dtype) for each in others):
        raise TaskError(f"the tasks of the run in {run.path} have samples of different shapes; name one of {listed}")
    return first


def predict_files(
    run: TrainedRun,
    learner: Learner,
    paths: Iterable[str | Path],
    *,
    task: str | None = None,
    top: int = 1,
    on_error: OnError,
) -> Iterator[Row]:
    """Predict the samples of picture files, folders of pictures and NumPy files, and yield rows in their order.

    Args:
        run: the run, whose samples' shape and type decide how files are read.
        learner: its learner.
        paths: files and folders.
        task: the samples' task; None, class-incremental, predicts among all classes seen.
        top: how many classes to give for a sample, the most probable first.
        on_error: receives the error of every file that cannot be predicted; the others are.
    """
    files = list(_opened(check_task(run, task), map(Path, paths), on_error))
    chunks = track(_chunks(files, on_error), "predicting", sum(math.ceil(file.count / BATCH) for file in files))
    for batch in _batches(chunks):
        parts = [samples for _, _, samples in batch]
        rows = iter(_predictions(run, learner, concatenate(parts), task, top))
        for (file, start, _), samples in zip(batch, parts, strict=True):
            for index in range(start, start + number_of_samples(samples)):
                origin = {"file": str(file.path), "index": None if file.is_picture else index}
                yield from (origin | row for row in next(rows))


def _opened(inputs: InputSpec, paths: Iterable[Path], on_error: OnError) -> Iterator[SampleFile]:
    for path in find_files(paths):
        try:
            yield open_file(path, inputs)
        except DataError as error:
            on_error(error)


def _chunks(files: Iterable[SampleFile], on_error: OnError) -> Iterator[Chunk]:
    """Read the files, in parts where they are large."""
    for file in files:
        try:
            for start in range(0, file.count, BATCH):
                yield file, start, file.read(start, min(start + BATCH, file.count))
        except DataError as error:
            on_error(error)


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    for chunk in chunks:
        batch.append(chunk)
        if sum(number_of_samples(samples) for _, _, samples in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _predictions(run: TrainedRun, learner: Learner, x: Samples, task: str | None, top: int) -> list[list[Row]]:
    """Return the rows of every sample."""
    if task is not None and run.tasks[task].kind != "classification":
        outputs = learner.predict(x, task).flatten(1)
        return [_own_rows(run.tasks[task], values) for values in outputs.cpu()]
    classes = learner.classes if task is None else [each for each in learner.classes if each[0] == task]
    probabilities = learner.predict_proba(x, task)
    values, indices = probabilities.topk(min(top, len(classes)), dim=1)
    return [
        [_row(run, classes[index], rank, value) for rank, (index, value) in enumerate(zip(*pair, strict=True), 1)]
        for pair in zip(indices.tolist(), values.tolist(), strict=True)
    ]


def _row(run: TrainedRun, kind: tuple[str, int], rank: int, probability: float) -> Row:
    task, label = kind
    return {"task": task, "rank": rank, "class": run.tasks[task].output_names[label], "probability": probability}


def _own_rows(task: RunTask, output: Tensor) -> list[Row]:
    """Return the numbers of a regression, or every label that is more probable than not, the most probable first."""
    names = task.output_names
    if task.kind == "regression":
        return [{"task": task.name, "outputs": dict(zip(names, output.tolist(), strict=True))}]
    values, order = output.sigmoid().sort(descending=True)
    found = [(names[index], value) for index, value in zip(order.tolist(), values.tolist(), strict=True) if value > 0.5]
    rows: list[Row] = [
        {"task": task.name, "rank": rank, "class": name, "probability": value}
        for rank, (name, value) in enumerate(found, 1)
    ]
    return rows or [{"task": task.name, "rank": None, "class": None, "probability": None}]


def _described(task: RunTask) -> str:
    names = task.class_names
    shown = [*names[:5], *(["…"] if len(names) > 5 else [])]
    return f"{task.name} ({', '.join(shown)})" if shown else task.name
