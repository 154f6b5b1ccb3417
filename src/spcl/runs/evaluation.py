"""Scores of tasks, forgetting, confusion (paper, §5.2) and filter statistics (§5.5)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl.distributed import World, deal
from spcl.learner import Learner
from spcl.orthogonality import filter_statistics
from spcl.runs.metrics import finite_or_none
from spcl.runs.tasks import RunTask

__all__ = [
    "Evaluation",
    "average_accuracy",
    "confusion_accuracy",
    "confusions",
    "convolution_statistics",
    "evaluate",
    "evaluate_on_ranks",
    "f1_score",
    "forgetting",
    "r_squared",
]

Tests = Mapping[str, tuple[Any, Tensor]]
"""Inputs and targets of every task."""


class Evaluation(NamedTuple):
    """The score of every task in per cent, and the confusion tables of the classifications."""

    scores: dict[str, float]
    tables: dict[str, NDArray[np.int64]]


def evaluate(learner: Learner, tests: Tests, tasks: Mapping[str, RunTask]) -> Evaluation:
    """Evaluate tasks by the metric of their kind: accuracy, R² or F1, all in per cent."""
    kinds = {name: tasks[name].kind for name in tests}
    tables = confusions(learner, {name: test for name, test in tests.items() if kinds[name] == "classification"})
    scores = {}
    for name, (x, y) in tests.items():
        if name in tables:
            scores[name] = confusion_accuracy(learner, name, tables[name])
        else:
            output = learner.predict(x, task=name).cpu()
            scores[name] = 100.0 * (r_squared if kinds[name] == "regression" else f1_score)(output, y)
    return Evaluation(scores, tables)


def evaluate_on_ranks(world: World, learner: Learner, tests: Tests, tasks: Mapping[str, RunTask]) -> Evaluation:
    """Evaluate as :func:`evaluate` does, every rank some of the tasks; all ranks get the whole."""
    names = list(tests)
    block = deal([len(y) for _, y in tests.values()], world.size)[world.rank]
    parts = world.gather_objects(evaluate(learner, {names[index]: tests[names[index]] for index in block}, tasks))
    scores = {name: score for part in parts for name, score in part.scores.items()}
    return Evaluation(scores, {name: table for part in parts for name, table in part.tables.items()})


def r_squared(output: Tensor, targets: Tensor) -> float:
    r"""Compute :math:`R^2 = 1 - \sum_{ij} (y_{ij} - o_{ij})^2 / \sum_{ij} (y_{ij} - \bar y_j)^2`.

    It is 1 for perfect predictions and 0 for those that always give the mean of each target.

    >>> targets = torch.tensor([[1.0], [2.0], [3.0]])
    >>> r_squared(targets, targets), r_squared(torch.full((3, 1), 2.0), targets)
    (1.0, 0.0)
    """
    output, targets = output.double(), targets.double()
    return 1.0 - float((targets - output).square().sum() / (targets - targets.mean(dim=0)).square().sum())


def f1_score(logits: Tensor, targets: Tensor) -> float:
    """Compute the micro-averaged F1, 2·TP / (2·TP + FP + FN), of all labels; a logit above 0 predicts its label.

    It is 1 where there is no label, neither in the targets nor predicted.

    >>> f1_score(torch.tensor([[2.0, -1.0], [0.5, -3.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    0.8
    """
    predicted, present = logits > 0, targets > 0
    hits, errors = int((predicted & present).sum()), int((predicted ^ present).sum())
    return 2 * hits / (2 * hits + errors) if hits or errors else 1.0


def confusions(learner: Learner, tests: Tests) -> dict[str, NDArray[np.int64]]:
    """Count for every task how often each of its classes (rows) was predicted as each class (columns).

    The columns are the task's own classes or, class-incremental, all classes seen.
    """
    if not tests:
        return {}
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
    r"""Compute :math:`A = \frac1T \sum_t a_{\bar e}^t`, the mean over tasks of the score at the end of the run.

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
