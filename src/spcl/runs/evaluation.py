"""Scores of tasks, forgetting, confusion (paper, §5.2) and filter statistics (§5.5); a saved model evaluated again."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl.data import ImageData, SourceData
from spcl.distributed import World
from spcl.engine.ranks import deal
from spcl.learner import Learner
from spcl.orthogonality import filter_statistics
from spcl.runs.build import pick_device
from spcl.runs.problem import is_named_data, make_problem
from spcl.runs.records import METRICS, FolderError, fingerprint, finite_or_none
from spcl.runs.trained import TrainedRun
from spcl.tasks import TaskDescription

Tests = Mapping[str, tuple[Any, Tensor]]
"""Inputs and targets of every task."""


class Evaluation(NamedTuple):
    """The score of every task in per cent, and the confusion tables of the classifications."""

    scores: dict[str, float]
    tables: dict[str, NDArray[np.int64]]


def evaluate(learner: Learner, tests: Tests, tasks: Mapping[str, TaskDescription]) -> Evaluation:
    """Evaluate tasks by the metric of their kind: accuracy, R² or F1, all in per cent."""
    kinds = {name: tasks[name].kind for name in tests}
    tables = confusions(learner, {name: test for name, test in tests.items() if kinds[name] == "classification"})
    scores = {}
    for name, (x, y) in tests.items():
        if name in tables:
            scores[name] = confusion_accuracy(learner, name, tables[name])
        else:
            output = learner.logits(x, task=name).cpu()  # NaN, too, where training has diverged
            scores[name] = 100.0 * (r_squared if kinds[name] == "regression" else f1_score)(output, y)
    return Evaluation(scores, tables)


def evaluate_on_ranks(world: World, learner: Learner, tests: Tests, tasks: Mapping[str, TaskDescription]) -> Evaluation:
    """Evaluate as :func:`evaluate` does, each rank a part of the tasks; every rank gets all scores."""
    names = list(tests)
    block = deal([len(y) for _, y in tests.values()], world.size)[world.rank]
    parts = world.gather_objects(evaluate(learner, {names[index]: tests[names[index]] for index in block}, tasks))
    scores = {name: score for part in parts for name, score in part.scores.items()}
    return Evaluation(scores, {name: table for part in parts for name, table in part.tables.items()})


def r_squared(output: Tensor, targets: Tensor) -> float:
    r"""Compute :math:`R^2 = 1 - \sum_{ij} (y_{ij} - o_{ij})^2 / \sum_{ij} (y_{ij} - \bar y_j)^2`.

    It is 1 for perfect predictions and 0 for predictions that always give the mean of each target.

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
    logits = (learner.logits(x, task=task if with_task else None) for task, (x, _) in tests.items())
    predicted = [each.argmax(dim=1) for each in logits]
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


# -- a saved model beside what its run recorded


ROUNDING = 0.01


@dataclass(frozen=True)
class Reevaluation:
    """The scores of every task in per cent, their metrics, and their mean A: as recorded and now."""

    metrics: Mapping[str, str]
    recorded: Mapping[str, float]
    now: Mapping[str, float]

    @property
    def averages(self) -> tuple[float, float]:
        """A as recorded and now."""
        return average_accuracy(self.recorded), average_accuracy(self.now)

    @property
    def difference(self) -> float:
        """The largest difference of a task's score.

        >>> Reevaluation({"a": "accuracy", "b": "accuracy"}, {"a": 80.0, "b": 60.0}, {"a": 80.0, "b": 59.5}).difference
        0.5
        """
        return max(abs(self.now[task] - score) for task, score in self.recorded.items())


def evaluate_run(
    run: TrainedRun,
    device: str = "auto",
    data_dir: str | None = None,
    data: ImageData | SourceData | None = None,
) -> Reevaluation:
    """Load data and model of a run, and evaluate every task on the test data as the run did.

    A warning is given if scores differ by more than rounding, or if the data has changed.

    Args:
        run: the run.
        device: ``cpu``, ``cuda``, …; ``auto`` is a GPU if there is one.
        data_dir: where the publishers' files are, if not where they were.
        data: the data of a run that was made with data from Python.
    """
    if data is None and not is_named_data(run.settings.benchmark):
        raise FolderError(
            f"the data {run.settings.benchmark!r} of the run in {run.path} came from Python; evaluate it there, with "
            f"evaluate_run(read_run(path), data=…)"
        )
    chosen = pick_device(device)
    settings = run.settings.model_copy(update={} if data_dir is None else {"data_dir": data_dir})
    problem = make_problem(settings, chosen, data)
    learner = run.learner(device)
    now = evaluate(learner, {task: problem.tests[task] for task in run.result.tasks}, problem.tasks).scores
    metrics = {name: METRICS[task.kind] for name, task in run.tasks.items()}
    outcome = Reevaluation(metrics, {task: result.final for task, result in run.result.tasks.items()}, now)
    if run.result.fingerprint not in (None, fingerprint(problem.data)):
        warnings.warn(f"the data of {settings.benchmark} has changed since the run was made", stacklevel=2)
    elif outcome.difference > ROUNDING:
        warnings.warn(
            f"scores differ by up to {outcome.difference:.2f} from the recorded ones on the same data; another "
            f"device or version of PyTorch can change the class of a few samples",
            stacklevel=2,
        )
    return outcome
