"""Predictions from an immutable copy of a learner's weights, by any number of threads while the learner trains on."""

from dataclasses import dataclass

from torch import Tensor

from spcl.batches import Inputs, describe
from spcl.errors import DataError, TaskError
from spcl.learner import Learner
from spcl.learner.prediction import Predictor as ModelPredictor
from spcl.methods.tasks import Task

__all__ = ["Prediction", "Predictor"]


@dataclass(frozen=True)
class Prediction:
    """Predictions for the samples of a batch.

    Attributes:
        step: the number of steps after which the weights were copied.
        outputs: one row per sample: probabilities of the classes, or the output of a task's own head.
        classes: (task, class) of every column of probabilities; None for the output of an own head.
    """

    step: int
    outputs: Tensor
    classes: list[tuple[str, str]] | None


class Predictor:
    """A copy of a learner's model as it is now, with averaged weights where the learner averages.

    Nothing changes it, so that calls from any thread neither wait for a step nor for each other.

    >>> import torch
    >>> from torch import nn
    >>> from spcl.methods import SORO
    >>> learner = Learner(nn.Linear(4, 8), SORO())
    >>> learner.add_task("camera", classes=["cat", "dog"])
    >>> x = torch.randn(6, 4)
    >>> _ = learner.step({"camera": (x, torch.arange(6) % 2)})
    >>> predictor = Predictor.of(learner)
    >>> prediction = predictor.predict(x, "camera")
    >>> prediction.classes, prediction.outputs.shape
    ([('camera', 'cat'), ('camera', 'dog')], torch.Size([6, 2]))
    >>> _ = learner.step({"camera": (x, torch.arange(6) % 2)})
    >>> torch.equal(predictor.predict(x, "camera").outputs, prediction.outputs)
    True
    """

    def __init__(self, model: ModelPredictor, step: int) -> None:
        self._model = model
        self.step = step

    @classmethod
    def of(cls, learner: Learner) -> "Predictor":
        """Return a predictor with copies of the weights; call it in the thread that trains, between two steps."""
        return cls(learner.snapshot(), learner.steps)

    @property
    def tasks(self) -> list[str]:
        """The tasks that can be predicted: those of which a batch has been learned."""
        return list(self._model.tasks)

    def predict(self, x: Inputs, task: str | None = None) -> Prediction:
        """Return probabilities of a task's classes, or the output of its own head; without ``task`` of all classes."""
        tasks = self._model.model.classifiers if task is None else [self._find(task)]
        known = {each.signature[0] for each in tasks if each.signature is not None}
        if known and describe(x, 1) not in known:
            raise DataError(
                f"the inputs are samples of {describe(x, 1)}, but expected are {' or '.join(sorted(known))}"
            )
        if task is not None and tasks[0].classes is None:
            return Prediction(self.step, self._model.predict(x, task).cpu(), None)
        names = [pair for pair in self._model.class_names if task is None or pair[0] == task]
        return Prediction(self.step, self._model.predict_proba(x, task).cpu(), names)

    def _find(self, task: str) -> Task:
        if task not in self._model.tasks:
            raise TaskError(f"there is no trained task {task!r}; the tasks are {self.tasks}")
        return self._model.tasks[task]
