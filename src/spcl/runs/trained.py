"""A complete run with its model: saved, loaded without the data, predicting files of samples."""

import math
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spcl._util.validation import validated
from spcl.batches import Inputs, as_tensor, concatenate, number_of_samples
from spcl.checkpoint import checked_content, read_checkpoint, write_checkpoint
from spcl.data.cache import track
from spcl.data.reading import Mode, decode_picture
from spcl.errors import CheckpointError, DataError, TaskError
from spcl.learner import Learner
from spcl.methods import recorded_settings
from spcl.models import InputSpec
from spcl.plugins import PluginError, load_plugins
from spcl.runs.build import learner_parts, make_heads, make_losses, pick_device
from spcl.runs.records import FolderError, RunFolder, RunResult, UnfinishedRunError
from spcl.runs.settings import RunSettings, load_settings_file
from spcl.tasks import TaskDescription


@dataclass(frozen=True)
class TrainedRun:
    """A complete run, or a service, with its model, as read from its folder.

    Attributes:
        path: the folder.
        settings: of the run.
        result: of the run; None of a service.
        tasks: what every task predicts, by name.
        inputs: shape and type of the samples that every task was trained on.
        state: the learner's :meth:`~spcl.learner.Learner.model_state`.
    """

    path: Path
    settings: RunSettings
    result: RunResult | None
    tasks: Mapping[str, TaskDescription]
    inputs: Mapping[str, InputSpec]
    state: Mapping[str, Any]

    def learner(self, device: str = "auto") -> Learner:
        """Return a learner with the trained model, a new optimiser and an empty memory."""
        try:
            with torch.random.fork_rng(devices=[]):
                steps = (self.result and self.result.steps) or 1
                parts = learner_parts(self.settings, list(self.inputs.values()), pick_device(device), steps)
                heads = make_heads(self.tasks.values(), parts["backbone"], self.settings)
            return Learner.load(
                self.state, **parts, heads=heads, losses=make_losses(self.tasks.values(), self.settings)
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"the model of the run in {self.path} does not fit its settings.json, which may have been changed: "
                f"{error}"
            ) from error


def load_run(path: str | Path, *, device: str = "auto", plugins: Sequence[str] = ()) -> Learner:
    """Load the trained model of a complete run as a learner, which can predict and be trained further.

    Neither the data nor the checkpoints of the run are needed. The optimiser is new, the memory empty.

    Args:
        path: the folder of the run.
        device: ``cpu``, ``cuda``, …; ``auto`` is a GPU if there is one.
        plugins: where the plug-ins of the run are now, if they were moved or changed, or came in an archive.

    Raises:
        UnfinishedRunError: if the run is not complete.
        FolderError: if the folder holds no run, or a run that kept no model.
        PluginError: if a plug-in of the run is missing or has changed.
        CheckpointError: if the model is damaged, or the settings have changed.
    """
    return read_run(path, plugins).learner(device)


def read_run(path: str | Path, plugins: Sequence[str] = ()) -> TrainedRun:
    """Read settings, result and model of a complete run; raises the errors of :func:`load_run`."""
    folder = RunFolder(Path(path).expanduser())
    if not folder.settings.is_file():
        raise FolderError(f"there is no run in {folder.path}{_runs_below(folder.path)}")
    result = folder.read_result()
    if result is None:
        raise UnfinishedRunError(f"the run in {folder.path} is not complete; resume it first")
    content = load_settings_file(folder.settings)
    content["method"] = recorded_settings(content["method"])
    settings = validated(RunSettings, content, f"the settings of the run in {folder.path}")
    if folder.bundle.exists() and settings.plugins and not plugins:
        names = ", ".join(plugin.name for plugin in settings.plugins)
        raise PluginError(
            f"the run in {folder.path} came in an archive with the plug-ins {names}, which are not run by themselves; "
            f"if you trust them, name them"
        )
    _load_plugins(settings, plugins)
    if not folder.model.exists():
        raise FolderError(f"{_why_no_model(folder, content)}; run its settings again in another folder to get one")
    try:
        state = read_checkpoint(folder.model)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; run its settings again in another folder") from error
    with checked_content(folder.model):
        tasks = {entry["name"]: _restored_task(entry) for entry in state["predicts"]}
        kinds = [InputSpec.from_state_dict(entry) for entry in state["inputs"]]
        inputs = dict(zip(tasks, kinds if len(kinds) > 1 else kinds * len(tasks), strict=True))
        if known := sorted(tasks.keys() ^ {entry["name"] for entry in state["tasks"]}):
            raise CheckpointError(f"{folder.model} describes other tasks than its model has ({', '.join(known)})")
    return TrainedRun(folder.path, settings, result, tasks, inputs, state)


def _load_plugins(settings: RunSettings, given: Sequence[str]) -> None:
    """Load the given plug-ins or, without any, the plug-ins that the settings record."""
    if not given:
        load_plugins(settings.plugins)
        return
    recorded = {plugin.sha256 for plugin in settings.plugins}
    for plugin in load_plugins(given):
        if plugin.sha256 not in recorded:
            warnings.warn(f"{plugin.name} is not what the run was trained with (its checksum differs)", stacklevel=4)


def save_model(
    folder: RunFolder, learner: Learner, tasks: Iterable[TaskDescription], inputs: Sequence[InputSpec]
) -> None:
    """Write the model of a learner, and what rebuilds it without the data, to ``model.safetensors``.

    Args:
        folder: of the run.
        learner: the trained learner.
        tasks: what its tasks predict.
        inputs: of every task, or one of all.
    """
    folder.model.unlink(missing_ok=True)  # of a run that was stopped before it wrote its result
    more = {
        "predicts": [_saved_task(task) for task in tasks],
        "inputs": [each.state_dict() for each in inputs],
    }
    write_checkpoint(folder.model, learner.model_state() | more)


def _saved_task(task: TaskDescription) -> dict[str, Any]:
    names, counts = list(task.class_names or ()), list(task.class_counts or ())
    return {
        "name": task.name,
        "kind": task.kind,
        "outputs": task.classes,
        "class_names": names,
        "class_counts": counts,
    }


def _restored_task(saved: Mapping[str, Any]) -> TaskDescription:
    names, counts = (tuple(saved.get(key, ())) for key in ("class_names", "class_counts"))
    if not all(isinstance(name, str) for name in names) or len(names) not in (0, saved["outputs"]):
        raise CheckpointError(f"task {saved['name']!r} has {saved['outputs']!r:.80} outputs, named {names!r:.80}")
    checked = TaskDescription.of(saved["name"], saved["kind"], saved["outputs"])
    return replace(checked, class_names=names or None, class_counts=counts or None)


def _runs_below(path: Path) -> str:
    """Return what is in a folder without a run, as the end of a sentence."""
    if not path.is_dir():
        return ", which does not exist; give the folder of a run"
    below = next(path.rglob("settings.json"), None)
    return "; give the folder of a run" + (f", such as {below.parent}" if below else "")


def _why_no_model(folder: RunFolder, settings: Mapping[str, Any]) -> str:
    missing = f"the run in {folder.path} has no model"
    if "keep_model" not in settings:
        return f"{missing}, because an earlier version made it"
    return f"{missing}: {folder.model.name} was removed" if settings["keep_model"] else f"{missing} (keep_model=false)"


# -- files of samples


MODES: dict[int, Mode] = {1: "L", 3: "RGB"}
ARRAYS = (".npy", ".npz")

T = TypeVar("T")


@dataclass(frozen=True)
class SampleFile:
    """A file of samples.

    Attributes:
        path: the file.
        count: the number of its samples, 1 for a picture.
        is_picture: whether it is a picture, whose sample has no index.
        read: returns the samples from one index to another.
    """

    path: Path
    count: int
    is_picture: bool
    read: Callable[[int, int], Inputs]


def assemble(inputs: InputSpec, parts: Mapping[str, T]) -> T | dict[str, T] | tuple[T, ...]:
    """Return the parts of samples by name in the structure of the inputs: one alone, a dict, or a tuple.

    >>> pair = InputSpec.of((torch.zeros(1, 2), torch.zeros(1)))
    >>> assemble(pair, {"0": "first", "1": "second"})
    ('first', 'second')
    """
    if inputs.parts is None:
        return next(iter(parts.values()))
    return tuple(parts.values()) if all(name.isdigit() for name in parts) else dict(parts)


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files, and the visible pictures in folders; a folder without pictures is yielded as it is."""
    readable = Image.registered_extensions()
    for path in paths:
        files = sorted(path.rglob("[!.]*")) if path.is_dir() else []
        yield from [file for file in files if file.suffix.lower() in readable and file.is_file()] or [path]


def open_file(path: Path, inputs: InputSpec) -> SampleFile:
    """Open a picture, or an .npy or .npz file, whose samples are to fit these inputs."""
    if path.is_dir():
        raise DataError(f"{path}: expected a folder of pictures, found none in it")
    if path.suffix.lower() not in ARRAYS:
        return SampleFile(path, 1, True, lambda start, stop: _read_picture(path, inputs))
    expected = {"x": inputs} if inputs.parts is None else dict(inputs.parts)
    arrays = _read_arrays(path, expected)
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{path}: its arrays have different numbers of samples, {counts}; give one row per sample")

    def read(start: int, stop: int) -> Inputs:
        parts = {name: _samples(path, array[start:stop], expected[name]) for name, array in arrays.items()}
        return assemble(inputs, parts)

    return SampleFile(path, next(iter(counts.values())), False, read)


def _read_picture(path: Path, inputs: InputSpec) -> Tensor:
    """Read a picture as a batch of one, in the mode and size of the training data."""
    is_image = inputs.parts is None and inputs.dtype == torch.uint8 and len(inputs.shape) == 3
    if not is_image or inputs.shape[0] not in MODES:
        raise DataError(
            f"{path}: the model was trained on samples of {inputs}, not on pictures; give an .npy or .npz file"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    channels, height, width = inputs.shape
    return torch.from_numpy(decode_picture(content, str(path), MODES[channels], (width, height)).copy())[None]


def _read_arrays(path: Path, expected: dict[str, InputSpec]) -> dict[str, np.ndarray]:
    found = _load(path, expected)
    if missing := sorted(expected.keys() - found.keys()):
        raise DataError(f"{path} must hold the arrays {', '.join(expected)}, but it has no {', '.join(missing)}")
    return {name: _checked(path, name, found[name], inputs) for name, inputs in expected.items()}


def _load(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    try:
        if path.suffix.lower() == ".npy":
            return {"x": np.load(path, mmap_mode="r")}
        with path.open("rb") as file:
            loaded = np.load(file)
            return {name: loaded[name] for name in names if name in loaded}
    except OSError as error:
        reason = error.strerror or "it is damaged"
    except (ValueError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile):  # numpy's text advises to load pickles
        reason = "it is damaged, or its arrays hold Python objects"
    raise DataError(f"{path} cannot be read: {reason}")


def _checked(path: Path, name: str, array: np.ndarray, inputs: InputSpec) -> np.ndarray:
    if inputs.dtype == torch.uint8 and array.ndim == 3 and inputs.shape[0] == 1:
        array = array[:, None]  # grey pictures N×H×W, as in training data
    if array.ndim == 0 or array.shape[1:] != inputs.shape:
        raise DataError(f"{path}: {name} has the shape {array.shape}, expected (N, {str(inputs.shape)[1:]}")
    if not _fits(array.dtype, inputs.dtype):
        kind = str(inputs.dtype).removeprefix("torch.")
        raise DataError(f"{path}: {name} holds {array.dtype}, expected {kind}; convert it with astype({kind!r})")
    if len(array) == 0:
        raise DataError(f"{path}: {name} holds no samples")
    return array


def _fits(found: np.dtype[Any], expected: torch.dtype) -> bool:
    if expected.is_floating_point:
        return found.kind == "f"
    return found == np.uint8 if expected == torch.uint8 else found.kind in "iu"


def _samples(path: Path, array: np.ndarray, inputs: InputSpec) -> Tensor:
    x = as_tensor(np.ascontiguousarray(array)).to(inputs.dtype)
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise DataError(f"{path}: some values are NaN, infinite or too large for {x.dtype}; replace them")
    return x


# -- predictions as rows of plain data


BATCH = 256

Row = dict[str, Any]
"""A prediction for a sample: file, index and task, and then rank, class and probability, or outputs by name."""

Chunk = tuple[SampleFile, int, Inputs]
OnError = Callable[[DataError], object]


def asked_task(run: TrainedRun, task: str | None, source: str | None) -> str | None:
    """Return the task of predictions: the given one, the source's, or the only one of a domain-incremental run.

    None stands for all classes of a class-incremental run; an error lists the tasks or sources.
    """
    listed = "; ".join(map(_described, run.tasks.values()))
    if task is not None and task not in run.tasks:
        raise TaskError(f"the run in {run.path} has no task {task!r}; its tasks are {listed}")
    if source is not None:
        saved = {each["name"]: each["task"] for each in run.state.get("task_sources", [])}
        sources = saved or {name: name for name in run.tasks}  # earlier versions saved tasks alone
        if (known := sources.get(source)) is None:
            raise TaskError(f"the run in {run.path} has no source {source!r}; its sources are {', '.join(sources)}")
        if task not in (None, known):
            raise TaskError(f"source {source!r} of the run in {run.path} answers task {known!r}, not {task!r}")
        return known if run.settings.scenario != "class" else task
    return next(iter(run.tasks)) if task is None and run.settings.scenario == "domain" else task


def check_task(run: TrainedRun, task: str | None) -> InputSpec:
    """Return the inputs of a task, or of all tasks of a class-incremental run; an error lists the tasks."""
    listed = "; ".join(map(_described, run.tasks.values()))
    if task is not None:
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
    source: str | None = None,
    top: int = 1,
    on_error: OnError,
) -> Iterator[Row]:
    """Predict the samples of picture files, folders of pictures and NumPy files, and yield rows in their order.

    Args:
        run: the run, whose samples' shape and type decide how files are read.
        learner: its learner.
        paths: files and folders.
        task: the samples' task; None, class-incremental, predicts among all classes seen.
        source: whose samples they are; None, somebody who was never trained.
        top: how many classes to give for a sample, the most probable first.
        on_error: receives the error of every file that cannot be predicted; the others are.
    """
    task = asked_task(run, task, source)
    files = list(_opened(check_task(run, task), map(Path, paths), on_error))
    chunks = track(_chunks(files, on_error), "predicting", sum(math.ceil(file.count / BATCH) for file in files))
    for batch in _batches(chunks):
        parts = [samples for _, _, samples in batch]
        rows = iter(_predictions(run, learner, concatenate(parts), task, source, top))
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


def _predictions(
    run: TrainedRun, learner: Learner, x: Inputs, task: str | None, source: str | None, top: int
) -> list[list[Row]]:
    """Return the rows of every sample."""
    if task is not None and run.tasks[task].kind != "classification":
        outputs = learner.predict(x, task, source=source).flatten(1)
        return [_own_rows(run.tasks[task], values) for values in outputs.cpu()]
    classes = learner.classes if task is None else [each for each in learner.classes if each[0] == task]
    probabilities = learner.predict_proba(x, task, source=source)
    values, indices = probabilities.topk(min(top, len(classes)), dim=1)
    return [
        [_row(run, classes[index], rank, value) for rank, (index, value) in enumerate(zip(*pair, strict=True), 1)]
        for pair in zip(indices.tolist(), values.tolist(), strict=True)
    ]


def _row(run: TrainedRun, kind: tuple[str, int], rank: int, probability: float) -> Row:
    task, label = kind
    return {"task": task, "rank": rank, "class": run.tasks[task].output_names[label], "probability": probability}


def _own_rows(task: TaskDescription, output: Tensor) -> list[Row]:
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


def _described(task: TaskDescription) -> str:
    names = task.class_names or ()
    shown = [*names[:5], *(["…"] if len(names) > 5 else [])]
    return f"{task.name} ({', '.join(shown)})" if shown else task.name
