"""Predictions of a trained run for files of samples, as rows of plain data."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from spcl.data.progress import track
from spcl.errors import DataError, TaskError
from spcl.learner import Learner
from spcl.runs.model import TrainedRun
from spcl.runs.samples import SampleFile, Samples, find_files, open_file

__all__ = ["Row", "check_task", "predict_files"]

BATCH = 256

Row = dict[str, Any]
"""A prediction for a sample: file, index and task, and then rank, class and probability, or the outputs."""

Chunk = tuple[SampleFile, int, Samples]
OnError = Callable[[DataError], object]


def check_task(run: TrainedRun, task: str | None) -> None:
    """Refuse an unknown task, and None for a task-incremental run; the error lists the tasks with their classes."""
    names = [entry["name"] for entry in run.state["tasks"]]
    if task in names or (task is None and run.settings.scenario == "class"):
        return
    listed = "; ".join(_described(name, run.class_names.get(name, ())) for name in names)
    if task is None:
        raise TaskError(f"the run in {run.path} is task-incremental; name the task of the samples, one of {listed}")
    raise TaskError(f"the run in {run.path} has no task {task!r}; its tasks are {listed}")


def predict_files(
    run: TrainedRun,
    learner: Learner,
    paths: Iterable[Path],
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
    check_task(run, task)
    files = list(_opened(run, paths, on_error))
    chunks = track(_chunks(files, on_error), "predicting", sum(math.ceil(file.count / BATCH) for file in files))
    for batch in _batches(chunks):
        parts = [samples for _, _, samples in batch]
        rows = iter(_predictions(run, learner, _concatenated(parts), task, top))
        for (file, start, _), samples in zip(batch, parts, strict=True):
            for index in range(start, start + _length(samples)):
                origin = {"file": str(file.path), "index": None if file.is_picture else index}
                yield from (origin | row for row in next(rows))


def _opened(run: TrainedRun, paths: Iterable[Path], on_error: OnError) -> Iterator[SampleFile]:
    for path in find_files(paths):
        try:
            yield open_file(path, run.inputs)
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
        if sum(_length(samples) for _, _, samples in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _predictions(run: TrainedRun, learner: Learner, x: Samples, task: str | None, top: int) -> list[list[Row]]:
    """Return the rows of every sample."""
    if task is not None and learner.tasks[task].classes is None:
        outputs = learner.predict(cast(Tensor, x), task).flatten(1).tolist()
        return [[{"task": task, "outputs": values}] for values in outputs]
    classes = learner.classes if task is None else [each for each in learner.classes if each[0] == task]
    probabilities = learner.predict_proba(cast(Tensor, x), task)
    values, indices = probabilities.topk(min(top, len(classes)), dim=1)
    return [
        [_row(run, classes[index], rank, value) for rank, (index, value) in enumerate(zip(*pair, strict=True), 1)]
        for pair in zip(indices.tolist(), values.tolist(), strict=True)
    ]


def _row(run: TrainedRun, kind: tuple[str, int], rank: int, probability: float) -> Row:
    task, label = kind
    names = run.class_names.get(task)
    return {"task": task, "rank": rank, "class": names[label] if names else str(label), "probability": probability}


def _described(task: str, classes: Sequence[str]) -> str:
    shown = [*classes[:5], *(["…"] if len(classes) > 5 else [])]
    return f"{task} ({', '.join(shown)})" if shown else task


def _length(samples: Samples) -> int:
    return len(samples if isinstance(samples, Tensor) else next(iter(samples.values())))


def _concatenated(parts: Sequence[Samples]) -> Samples:
    if isinstance(parts[0], Tensor):
        return torch.cat(cast(list[Tensor], parts))
    return {name: torch.cat([cast(dict[str, Tensor], part)[name] for part in parts]) for name in parts[0]}
