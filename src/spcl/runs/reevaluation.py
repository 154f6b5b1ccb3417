"""Evaluation of the saved model of a run, beside what the run recorded."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from spcl.runs.build import pick_device
from spcl.runs.evaluation import average_accuracy, confusion_accuracy, confusions
from spcl.runs.model import TrainedRun
from spcl.runs.problem import make_problem
from spcl.runs.provenance import fingerprint

__all__ = ["Reevaluation", "evaluate_run"]

ROUNDING = 0.01


@dataclass(frozen=True)
class Reevaluation:
    """Accuracies of every task, and their mean A, in per cent: as recorded and now."""

    recorded: Mapping[str, float]
    now: Mapping[str, float]

    @property
    def averages(self) -> tuple[float, float]:
        """A as recorded and now."""
        return average_accuracy(self.recorded), average_accuracy(self.now)

    @property
    def difference(self) -> float:
        """The largest difference of a task's accuracy.

        >>> Reevaluation({"a": 80.0, "b": 60.0}, {"a": 80.0, "b": 59.5}).difference
        0.5
        """
        return max(abs(self.now[task] - accuracy) for task, accuracy in self.recorded.items())


def evaluate_run(run: TrainedRun, device: str = "auto", data_dir: str | None = None) -> Reevaluation:
    """Load data and model of a run, and evaluate every task on the test data as the run did.

    A warning is given if accuracies differ by more than rounding, or if the data has changed.
    """
    chosen = pick_device(device)
    settings = run.settings.model_copy(update={} if data_dir is None else {"data_dir": data_dir})
    problem = make_problem(settings, chosen)
    learner = run.learner(device)
    tables = confusions(learner, {task: problem.tests[task] for task in run.result.tasks})
    now = {task: confusion_accuracy(learner, task, table) for task, table in tables.items()}
    outcome = Reevaluation({task: result.final for task, result in run.result.tasks.items()}, now)
    if run.result.fingerprint not in (None, fingerprint(problem.data)):
        warnings.warn(f"the data of {settings.benchmark} has changed since the run was made", stacklevel=2)
    elif outcome.difference > ROUNDING:
        warnings.warn(
            f"accuracies differ by up to {outcome.difference:.2f} from the recorded ones on the same data; another "
            f"device or version of PyTorch can change the class of a few samples",
            stacklevel=2,
        )
    return outcome
