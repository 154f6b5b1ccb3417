"""The trained model of a run: written when the run is complete, and loaded as a learner without the data."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.errors import CheckpointError
from spcl.learner import Learner
from spcl.methods import recorded_settings
from spcl.models import InputSpec
from spcl.plugins import load_plugins
from spcl.runs.build import learner_parts
from spcl.runs.devices import pick_device
from spcl.runs.folder import FolderError, RunFolder, UnfinishedRunError
from spcl.runs.result import RunResult
from spcl.runs.settings import RunSettings, load_settings_file
from spcl.runs.tasks import RunTask, make_heads, make_losses
from spcl.validation import validated

__all__ = ["TrainedRun", "load_run", "read_run", "save_model"]


@dataclass(frozen=True)
class TrainedRun:
    """A complete run with its model, as read from its folder.

    Attributes:
        path: the folder.
        settings: of the run.
        result: of the run.
        tasks: what every task predicts, by name.
        inputs: shape and type of the samples that every task was trained on.
        state: the learner's :meth:`~spcl.learner.Learner.model_state`.
    """

    path: Path
    settings: RunSettings
    result: RunResult
    tasks: Mapping[str, RunTask]
    inputs: Mapping[str, InputSpec]
    state: Mapping[str, Any]

    def learner(self, device: str = "auto") -> Learner:
        """Return a learner with the trained model, a new optimiser and an empty memory."""
        try:
            with torch.random.fork_rng(devices=[]):
                steps = self.result.steps or 1
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
        plugins: where the plug-ins of the run are now, if they were moved or changed.

    Raises:
        UnfinishedRunError: if the run is not complete.
        FolderError: if there is no run in the folder, or none that kept its model.
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
    _load_plugins(settings, plugins)
    if not folder.model.exists():
        raise FolderError(f"{_why_no_model(folder, content)}; run its settings again in another folder to get one")
    try:
        state = read_checkpoint(folder.model)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; run its settings again in another folder") from error
    tasks = {entry["name"]: RunTask.model_validate(entry) for entry in state["predicts"]}
    kinds = [InputSpec.from_state_dict(entry) for entry in state["inputs"]]
    inputs = dict(zip(tasks, kinds if len(kinds) > 1 else kinds * len(tasks), strict=True))
    return TrainedRun(folder.path, settings, result, tasks, inputs, state)


def _load_plugins(settings: RunSettings, given: Sequence[str]) -> None:
    """Load the plug-ins that are given, or else those that the settings record."""
    if not given:
        load_plugins(settings.plugins)
        return
    recorded = {plugin.sha256 for plugin in settings.plugins}
    for plugin in load_plugins(given):
        if plugin.sha256 not in recorded:
            warnings.warn(f"{plugin.name} is not what the run was trained with: its checksum is another", stacklevel=4)


def save_model(folder: RunFolder, learner: Learner, tasks: Iterable[RunTask], inputs: Sequence[InputSpec]) -> None:
    """Write the model of a learner, and what rebuilds it without the data, to ``model.safetensors``.

    Args:
        folder: of the run.
        learner: the trained learner.
        tasks: what its tasks predict.
        inputs: of every task, or one of all.
    """
    folder.model.unlink(missing_ok=True)  # of a run that was stopped before it wrote its result
    more = {
        "predicts": [task.model_dump(mode="json") for task in tasks],
        "inputs": [each.state_dict() for each in inputs],
    }
    write_checkpoint(folder.model, learner.model_state() | more)


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
