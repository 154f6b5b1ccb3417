"""The learner of a service: a new one from its settings, or the one in its checkpoint."""

from pathlib import Path
from typing import Any

import torch

from spcl.batches import describe
from spcl.checkpoint import read_newest
from spcl.errors import CheckpointError
from spcl.learner import Learner
from spcl.methods import recorded_settings
from spcl.models import InputSpec
from spcl.runs import RunSettings
from spcl.runs.build import learner_options, learner_parts
from spcl.runs.devices import pick_device
from spcl.runs.tasks import make_heads, make_losses
from spcl.serve.records import Records
from spcl.serve.samples import example_inputs
from spcl.serve.settings import LEARNER
from spcl.streams import LiveStream

__all__ = ["load_learner", "new_learner"]


def new_learner(settings: RunSettings, inputs: InputSpec, records: Records) -> Learner:
    """Return a learner without tasks; its settings are recorded."""
    torch.manual_seed(settings.seed)
    records.learner = _identity(settings)
    parts = learner_parts(settings, [inputs], pick_device(settings.device), steps=1)
    return Learner(**parts, **learner_options(settings), memory_batch=settings.memory_batch)


def load_learner(path: Path, settings: RunSettings, inputs: InputSpec, records: Records, stream: LiveStream) -> Learner:
    """Return the learner of the checkpoint, or of the one before, and restore records and stream with it."""
    state = read_newest(path)
    if "service" not in state.get("sources", {}):
        raise CheckpointError(f"{path} is no checkpoint of a service; choose another state folder")
    records.load_state_dict(state["sources"]["service"])
    _check_same(path, records.learner, _identity(settings))
    _check_inputs(path, state["tasks"], inputs)
    parts = learner_parts(settings, [inputs], pick_device(settings.device), steps=1)
    added = {entry["name"] for entry in state["tasks"]}
    tasks = [record.run_task for record in records.tasks.values() if record.name in added]
    heads = make_heads(tasks, parts["backbone"], settings)
    return Learner.load(state, **parts, heads=heads, losses=make_losses(tasks, settings), stream=stream)


def _identity(settings: RunSettings) -> dict[str, Any]:
    """Return what must not change between two runs of a service on one state."""
    free = {"device", "threads", "capture", "low_memory"}
    return settings.model_dump(mode="json", include=set(LEARNER) - free)


def _check_same(path: Path, recorded: dict[str, Any], now: dict[str, Any]) -> None:
    recorded = {**recorded, "method": recorded_settings(recorded["method"])}
    for name, value in now.items():
        if name in recorded and recorded[name] != value:
            raise CheckpointError(
                f"the learner in {path} has {name} = {recorded[name]!r}, and the settings say {value!r}; "
                f"put the setting back, or choose another state folder"
            )


def _check_inputs(path: Path, tasks: list[dict[str, Any]], inputs: InputSpec) -> None:
    """Refuse other inputs than those of the learner's tasks, all of whose messages would be refused."""
    now = describe(example_inputs(inputs), 1)
    for task in tasks:
        if task["signature"] is not None and task["signature"][0] != now:
            raise CheckpointError(
                f"task {task['name']!r} of the learner in {path} has samples of {task['signature'][0]}, and the "
                f"settings say inputs of {now}; put the setting back, or choose another state folder"
            )
