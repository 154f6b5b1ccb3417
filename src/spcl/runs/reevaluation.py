"""Evaluation of the saved model of a run, beside what the run recorded."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from spcl.data import ImageData, SourceData
from spcl.runs.devices import pick_device
from spcl.runs.evaluation import average_accuracy, evaluate
from spcl.runs.folder import FolderError
from spcl.runs.loading import is_named_data
from spcl.runs.model import TrainedRun
from spcl.runs.problem import make_problem
from spcl.runs.provenance import fingerprint

__all__ = ["Reevaluation", "evaluate_run"]

ROUNDING = 0.01


@dataclass(frozen=True)
class Reevaluation:
    """Scores of every task in per cent, with what they are, and their mean A: as recorded and now."""

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
    metrics = {name: task.metric for name, task in run.tasks.items()}
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
