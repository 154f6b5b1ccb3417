"""Accuracy, forgetting and confusion (paper §5.2)."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.learner import Learner

__all__ = ["average_accuracy", "confusions", "forgetting", "own_share"]


def confusions(learner: Learner, tests: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, NDArray[np.int64]]:
    """For every task, how often each of its classes (rows) was taken for each class (columns).

    The columns are the task's own classes or, class-incremental, all classes seen.
    """
    guesses = [learner.predict(x, task=task if learner.scenario == "task" else None) for task, (x, _) in tests.items()]
    fetched = torch.split(torch.cat(guesses).cpu(), [len(guess) for guess in guesses])  # a GPU is waited for once
    return {task: _table(learner, task, y, guess) for (task, (_, y)), guess in zip(tests.items(), fetched, strict=True)}


def _table(learner: Learner, task: str, y: Tensor, guess: Tensor) -> NDArray[np.int64]:
    classes = learner.tasks[task].classes or 0
    columns = classes if learner.scenario == "task" else len(learner.classes)
    return torch.bincount(y * columns + guess, minlength=classes * columns).view(classes, columns).numpy()


def own_share(learner: Learner, task: str, table: NDArray[np.int64]) -> float:
    """The accuracy that a confusion table shows, in per cent."""
    offset = 0 if learner.scenario == "task" else learner.tasks[task].offset
    return 100.0 * float(np.trace(table[:, offset:])) / float(table.sum())


def average_accuracy(final: Mapping[str, float]) -> float:
    r""":math:`A = \frac1T \sum_t a_{\bar e}^t`, the mean over tasks of the accuracy at the very end.

    >>> average_accuracy({"a": 80.0, "b": 60.0})
    70.0
    """
    return float(np.mean(list(final.values())))


def forgetting(final: Mapping[str, float], at_end: Mapping[str, float]) -> float:
    r""":math:`F = \frac1T \sum_t (a_{\bar e}^t - a_{e_t}^t)`: what became of the accuracy each task ended with.

    >>> forgetting({"a": 80.0, "b": 60.0}, {"a": 90.0, "b": 60.0})
    -5.0
    """
    return float(np.mean([final[task] - at_end[task] for task in final]))
