"""A benchmark of a few hundred made-up samples, on which a run takes a fraction of a second."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spcl.learner import StepReport
from spcl.runs import RunSettings, SilentView, resolve_settings


def write_benchmark(path: Path, classes: int = 6, per_class: int = 40, features: int = 8) -> Path:
    """Gaussian clusters, one per class, as an .npz file that ``--benchmark`` takes."""
    rng = np.random.default_rng(0)
    centres = rng.normal(scale=2.0, size=(classes, features))

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.repeat(np.arange(classes), count)
        return (centres[y] + rng.normal(size=(len(y), features))).astype(np.float32), y

    (x, y), (test_x, test_y) = draw(per_class), draw(20)
    np.savez(path, x=x, y=y, test_x=test_x, test_y=test_y)
    return path


def small_settings(benchmark: Path, **changes: Any) -> RunSettings:
    small = {"tasks": 3, "batch_size": 8, "memory_budget": 24, "threads": 1, "device": "cpu"}
    return resolve_settings({"benchmark": str(benchmark)}, small, changes)


class StopAtStep(SilentView):
    """Stops the run after a step, as SIGTERM does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        if report.step == self._step:
            signal.raise_signal(signal.SIGTERM)
