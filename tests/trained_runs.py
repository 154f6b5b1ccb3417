"""Complete runs on pictures of named classes, with the learners that were trained."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spcl.files import write_json
from spcl.learner import Learner
from spcl.runs import RunFolder, SilentView, resolve_settings
from spcl.runs.training import TrainingRun
from tiny_runs import tiny_data

NAMES = np.array(["ant", "bee", "cat", "dog", "eel", "fox"])


class Trained(NamedTuple):
    path: Path
    learner: Learner
    x: np.ndarray  # the test samples
    y: np.ndarray  # their classes' names


def train(base: Path, name: str, **changes: Any) -> Trained:
    """Train two tasks of three classes each in a folder below ``base``."""
    base.mkdir(parents=True, exist_ok=True)
    data = base / "named.npz"
    with np.load(tiny_data(base)) as arrays:
        content = {key: NAMES[array] if key.endswith("y") else array for key, array in arrays.items()}
    np.savez(data, **content)
    small = {"tasks": 2, "batch_size": 8, "memory_budget": 12, "threads": 1, "device": "cpu", "backbone": "cnn"}
    settings = resolve_settings({"benchmark": str(data), "method": "soro"}, small, changes)
    folder = RunFolder(base / name)
    with folder.locked():
        write_json(folder.settings, settings.model_dump(mode="json"))
        run = TrainingRun(settings, folder, SilentView(), ())
        run.complete()
    return Trained(folder.path, run.learner, content["test_x"], content["test_y"])
