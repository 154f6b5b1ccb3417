"""Complete runs on pictures of named classes, with the learners that were trained."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spcl._util.files import write_json
from spcl.learner import Learner
from spcl.runs import RunFolder, SilentView, resolve_settings
from spcl.runs.run import TrainingRun
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
        run = TrainingRun(settings, folder, SilentView(), ())
        run.complete()
    return Trained(folder.path, run.learner, content["test_x"], content["test_y"])


def write_model_with_code(folder: Path) -> Path:
    """Write a model of Transformers with Python code of its own; return the file that this code makes if it runs."""
    folder.mkdir(exist_ok=True)
    mark = folder / "mark"
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    write_json(folder / "config.json", {"model_type": "own", "hidden_size": 8, "auto_map": classes})
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nimport transformers\n"
    (folder / "configuration_own.py").write_text(f"{code}class OwnConfig(transformers.PretrainedConfig): ...\n")
    (folder / "modeling_own.py").write_text(f"{code}class OwnModel(transformers.PreTrainedModel): ...\n")
    return mark
