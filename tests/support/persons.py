"""Persons of whom each moves in an own way: sources that share one question, on which a run takes a second."""

from pathlib import Path
from typing import Any

import numpy as np

from spcl.data import SourceData, from_npz
from spcl.runs import RunSettings, resolve_settings

ACTIVITIES = np.array(["run", "sit", "walk"])
PERSONS = ("anna", "ben", "cleo", "dan", "eve")
UNSEEN = ("eve",)


def write_persons(path: Path, tasks: int = 1, of_unseen: float = 1.0) -> Path:
    """Gaussian clusters, one per activity, scaled and shifted for every person, as an .npz file.

    Args:
        path: of the file.
        tasks: 1, or 2, which the persons answer in turn; the second task has two classes.
        of_unseen: a factor of the training samples of persons who are unseen.
    """
    rng = np.random.default_rng(0)
    centres = rng.normal(scale=2.0, size=(3, 6))
    arrays: dict[str, Any] = {}
    for number, name in enumerate(PERSONS):
        task = number % tasks
        scale, shift = rng.uniform(0.7, 1.3, 6), rng.normal(scale=0.5, size=6)
        for part, count in (("", 24), ("test_", 10)):
            y = np.tile(np.arange(3 - task), count)
            x = (centres[y + task] + rng.normal(size=(len(y), 6))) * scale + shift
            if name in UNSEEN and not part:
                x = x * of_unseen
            arrays |= {f"{name}_{part}x": x.astype(np.float32), f"{name}_{part}y": ACTIVITIES[y]}
        arrays[f"{name}_task"] = ("activity", "place")[task]
        arrays[f"{name}_unseen"] = name in UNSEEN
    np.savez(path, **arrays)
    return path


def read_persons(path: Path) -> SourceData:
    data = from_npz(path)
    assert isinstance(data, SourceData)
    return data


def persons_settings(path: Path, **changes: Any) -> RunSettings:
    small = {"batch_size": 8, "memory_budget": 30, "threads": 1, "device": "cpu", "method": "soro"}
    return resolve_settings({"benchmark": str(path)}, small, changes)
