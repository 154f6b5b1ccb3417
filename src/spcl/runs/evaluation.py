"""Accuracy, forgetting, confusion (paper, §5.2) and filter statistics (§5.5)."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl.learner import Learner
from spcl.orthogonality import filter_statistics
from spcl.runs.metrics import finite_or_none

__all__ = ["average_accuracy", "confusion_accuracy", "confusions", "convolution_statistics", "forgetting"]


def confusions(learner: Learner, tests: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, NDArray[np.int64]]:
    """Count for every task how often each of its classes (rows) was predicted as each class (columns).

    The columns are the task's own classes or, class-incremental, all classes seen.
    """
    with_task = learner.scenario == "task"
    predicted = [learner.predict(x, task=task if with_task else None) for task, (x, _) in tests.items()]
    on_host = torch.split(torch.cat(predicted).cpu(), [len(labels) for labels in predicted])  # waits for a GPU once
    pairs = zip(tests.items(), on_host, strict=True)
    return {task: _confusion(learner, task, y, labels) for (task, (_, y)), labels in pairs}


def confusion_accuracy(learner: Learner, task: str, table: NDArray[np.int64]) -> float:
    """Compute the accuracy of a confusion table, in per cent."""
    offset = 0 if learner.scenario == "task" else learner.tasks[task].offset
    return 100.0 * float(np.trace(table[:, offset:])) / float(table.sum())


def average_accuracy(final: Mapping[str, float]) -> float:
    r"""Compute :math:`A = \frac1T \sum_t a_{\bar e}^t`, the mean over tasks of the accuracy at the end of the run.

    >>> average_accuracy({"a": 80.0, "b": 60.0})
    70.0
    """
    return float(np.mean(list(final.values())))


def forgetting(final: Mapping[str, float], at_end: Mapping[str, float]) -> float:
    r"""Compute :math:`F = \frac1T \sum_t (a_{\bar e}^t - a_{e_t}^t)`, the mean change since each task ended.

    >>> forgetting({"a": 80.0, "b": 60.0}, {"a": 90.0, "b": 60.0})
    -5.0
    """
    return float(np.mean([final[task] - at_end[task] for task in final]))


def convolution_statistics(backbone: nn.Module) -> dict[str, dict[str, float | None]]:
    """Compute conditioning, norm and redundancy of the filters of every convolution, by layer name."""
    names = [name for name, layer in backbone.named_modules() if isinstance(layer, nn.Conv2d)]
    statistics = filter_statistics(backbone, names) if names else {}
    return {name: finite_or_none(vars(values)) for name, values in statistics.items()}


def _confusion(learner: Learner, task: str, y: Tensor, predicted: Tensor) -> NDArray[np.int64]:
    classes = learner.tasks[task].classes or 0
    columns = classes if learner.scenario == "task" else len(learner.classes)
    return torch.bincount(y * columns + predicted, minlength=classes * columns).view(classes, columns).numpy()
