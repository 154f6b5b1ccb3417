"""Predictions of a shared model with a head per task, their evaluation, and the model as a plain module."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spcl.batches import (
    Batch,
    BatchLike,
    Inputs,
    InputsLike,
    as_batch,
    as_inputs,
    converted,
    describe,
    number_of_samples,
    split,
)
from spcl.engine.model import SharedModel, batch_statistics, checked_loss
from spcl.engine.ranks.sharded import refuse_sharded
from spcl.engine.update import WeightAverage
from spcl.errors import DataError, SpclError, TaskError
from spcl.learner.checks import OneCallAtATime, find_task, labelled, samples_of
from spcl.learner.parameters import uncompiled
from spcl.learner.predictors import PredictionHeads
from spcl.methods.base import Output
from spcl.options import Scenario
from spcl.tasks import Task, check_targets

PREDICT_BATCH = 1024


class Predictor:
    """Predicts with a shared model, batch by batch, in evaluation mode and without gradients.

    Args:
        model: the shared model.
        average: the average of its weights, with which it then predicts; or None.
        heads: the heads by which classifiers predict.
        calls: refuses predictions while a learner changes the model; None if nothing changes it.
    """

    def __init__(
        self,
        model: SharedModel,
        average: WeightAverage | None,
        heads: PredictionHeads,
        calls: OneCallAtATime | None = None,
    ) -> None:
        self.model = model
        self._average = average
        self._heads = heads
        self._calls = calls

    @property
    def scenario(self) -> Scenario:
        """Task-incremental or class-incremental."""
        return self.model.scenario

    @property
    def tasks(self) -> dict[str, Task]:
        """All tasks ever added, in that order."""
        return self.model.tasks

    @property
    def active_tasks(self) -> list[str]:
        """The tasks that are not finished."""
        return [name for name, task in self.tasks.items() if not task.finished]

    @property
    def classes(self) -> list[tuple[str, int]]:
        """(task, label) of every class seen, in the order of class-incremental predictions."""
        return [(task.name, label) for task in self.model.classifiers for label in range(task.classes or 0)]

    @property
    def class_names(self) -> list[tuple[str, str]]:
        """(task, name) of every class in :attr:`classes`; the label as text where a task's classes have no names."""
        return [pair for task in self.model.classifiers for pair in named_classes(task)]

    def predict(self, x: InputsLike, task: str | None = None, *, batch_size: int = PREDICT_BATCH) -> Tensor:
        """Return labels for inputs, on the model's device.

        With ``task``, that task's labels (or the output of its own head). Without, class-incremental: indices into
        :attr:`classes`, over all classes seen.

        Inputs must have the shape and type that the task was trained on; floating-point numbers are converted. An input
        without a prediction, because its scores are NaN, raises an error: :meth:`logits` gives the scores as they are.
        """
        scores = self._scores(x, task, batch_size)
        return scores if task is not None and self.tasks[task].classes is None else scores.argmax(dim=1)

    def predict_proba(self, x: InputsLike, task: str | None = None, *, batch_size: int = PREDICT_BATCH) -> Tensor:
        """Return the probabilities of a classifier's classes, or of all classes seen: the softmax of the logits."""
        if task is not None and find_task(self.tasks, task).classes is None:
            raise TaskError(f"task {task!r} has a head of its own and no classes; use predict(x, {task!r})")
        return self._scores(x, task, batch_size).softmax(dim=1)

    def logits(self, x: InputsLike, task: str | None = None, *, batch_size: int = PREDICT_BATCH) -> Tensor:
        """Return the scores behind :meth:`predict`, of ``batch_size`` inputs at a time.

        They may be NaN, and the inputs may be any that the network takes.
        """
        chosen = self._chosen(task)
        if not isinstance(batch_size, int) or batch_size < 1:
            raise SpclError(f"batch_size is {batch_size!r}; give a positive whole number")
        inputs, _ = self._fitted(_checked_inputs(x), chosen)
        heads, reading = self._prediction_heads(), self._reading("a prediction")
        with reading, self.model.task_errors(chosen, inputs), torch.no_grad(), self.averaged_weights(), heads:
            return torch.cat([self.model.logits(part, chosen) for part in split(inputs, batch_size)])

    def logits_to_store(self, x: Inputs, task: Task | None) -> Tensor:
        """Return the logits of one batch of samples as in training: of the trained heads, whatever predicts."""
        own = batch_statistics(self.model.modules()) if number_of_samples(x) > 1 else nullcontext()
        with torch.no_grad(), self.averaged_weights(), own:
            return self.model.logits(x, task)

    def evaluate(self, loader: Iterable[BatchLike], task: str | None = None) -> float:
        """Return the accuracy of a classifier, from 0 to 1, or the mean loss of another task, on (inputs, targets).

        Labels are the task's, or probabilities: then the most probable class counts. A class-incremental prediction is
        correct if it is the right class among all classes seen; without ``task``, labels are indices into
        :attr:`classes`. Samples of a classifier with the label −100 are left out, and where the model gives NaN, the
        prediction is wrong. The mean loss is over the samples, of a loss that is itself a mean over its batch.
        """
        chosen = self._chosen(task)
        total, count = torch.zeros((), dtype=torch.float64, device=self.model.device), 0
        for batch in loader:
            x, y = self._checked(batch, chosen)
            if not len(y):  # no sample has a label
                continue
            total += self._score(x, y.to(self.model.device), chosen)
            count += len(y)
        if count == 0:
            raise TaskError(
                "there is nothing to evaluate: the loader gives no batch with labels; note that an iterator is used up"
            )
        return float(total) / count

    def module(self, task: str | None = None) -> nn.Module:
        """Return backbone and head of a task as a plain module, or without ``task`` the logits of all classes seen.

        It shares parameters (averaged weights, where there are any) and buffers with this model, so that it follows
        further training, but has modes of its own: it is in evaluation mode. It computes in the precision of its
        parameters, without autocast, and takes inputs on their device. Tasks that are added later are not part of it.
        If ``predict_by`` is not ``"head"``, it has the current prediction heads, which later training does not change.
        """
        refuse_sharded(self.model.backbone, "copied")
        chosen = self._chosen(task)
        tasks = self.model.classifiers if chosen is None else [chosen]
        with self._reading("module"):
            heads = [self._sharing_copy(head) for head in self.present_heads(tasks)]
            backbone = self._sharing_copy(uncompiled(self.model.backbone))
        top = ("heads", JointHeads(heads)) if chosen is None else ("head", heads[0])
        return nn.Sequential(OrderedDict([("backbone", backbone), top])).eval()

    def snapshot(self) -> "Predictor":
        """Return a predictor with copies of the weights and heads that predict now, which follow no training."""
        refuse_sharded(self.model.backbone, "copied")
        with self._reading("snapshot"):
            averages = {} if self._average is None else self._average.averages
            memo: dict[int, Any] = {id(each): _like(each, value.clone(), False) for each, value in averages.items()}
            trained = [task for task in self.tasks.values() if task.head is not None]
            parts = (uncompiled(self.model.backbone), trained, self.present_heads(trained))
            backbone, tasks, heads = copy.deepcopy(parts, memo)
        model = SharedModel(backbone, self.scenario, nn.Linear, 0, self.model.autocast)
        for task, head in zip(tasks, heads, strict=True):
            task.head = head
            model.tasks[task.name] = task
        for module in model.modules():
            module.eval()
        return Predictor(model, None, PredictionHeads("head", None))

    def _reading(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a call that predicts, which a learner allows between the calls that change it."""
        return nullcontext() if self._calls is None else self._calls.reading(name)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Let the model be in evaluation mode and have the averaged weights, if there are any, within the block."""
        modes = nullcontext() if self._calls is None else self.model.evaluating()  # a snapshot is in no other mode
        with modes, nullcontext() if self._average is None else self._average.applied():
            yield

    def present_heads(self, tasks: Iterable[Task]) -> list[nn.Module]:
        """Return the heads by which tasks predict now."""
        with torch.no_grad(), self.averaged_weights(), self._prediction_heads():
            return [self.model.head(each) for each in tasks]

    def _prediction_heads(self) -> AbstractContextManager[None]:
        """Let classifiers have the heads that predict within the block; enter it with the averaged weights."""
        return self._heads.applied(self.model)

    def _sharing_copy(self, module: nn.Module) -> nn.Module:
        """Copy a module but for its parameters, or their averages, and its buffers, which both then have."""
        shared: dict[int, Tensor] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        for tensor, value in ({} if self._average is None else self._average.averages).items():
            if id(tensor) in shared:
                shared[id(tensor)] = _like(tensor, value, tensor.requires_grad)
        return copy.deepcopy(module, shared)

    def _chosen(self, task: str | None) -> Task | None:
        """Return the task of this name, or None for all classes seen."""
        if task is not None:
            return find_task(self.tasks, task)
        if self.scenario == "task":
            raise TaskError(f"a task-incremental learner needs the task of x; pass task=, one of {list(self.tasks)}")
        if not self.model.classifiers:
            raise TaskError("there is no classification task yet; call add_task first")
        return None

    def _scores(self, x: InputsLike, task: str | None, batch_size: int) -> Tensor:
        """Return logits of inputs of the kind that was trained on, or raise an error, also where they are NaN."""
        inputs, fits = self._fitted(_checked_inputs(x), self._chosen(task))
        if not fits:
            learners = self.model.classifiers if task is None else [self.tasks[task]]
            learned = ", ".join(f"{each.name!r}: {each.signature[0]}" for each in learners if each.signature)
            raise TaskError(
                f"x has samples of {describe(inputs, 1)}, but the learner was trained on others ({learned}); give "
                f"inputs of the same shape and type as in training"
            )
        scores = self.logits(inputs, task, batch_size=batch_size)
        wrong = scores.isnan().flatten(1).any(dim=1) if scores.ndim > 1 else scores.isnan()
        if bool(wrong.any()):  # the largest of NaN would be class 0
            raise TaskError(
                f"the predictions for {int(wrong.sum())} of {len(wrong)} inputs are not finite, but NaN (first: input "
                f"{int(wrong.nonzero()[0])}); give inputs that are finite and not too large, or look at logits()"
            )
        return scores

    def _fitted(self, x: Inputs, task: Task | None) -> tuple[Inputs, bool]:
        """Return inputs in the floating-point type of a task, or of any classifier, and whether they are of its kind.

        A task that has seen no data takes any kind.
        """
        for each in self.model.classifiers if task is None else [task]:
            kind = None if each.signature is None else each.signature[0]
            fitting = converted(x, kind, self.model.dtype)
            if kind is None or describe(fitting, 1) == kind:
                return fitting, True
        return x, False

    def _checked(self, batch: BatchLike, task: Task | None) -> Batch:
        if task is not None:
            samples = samples_of(task, batch, self.model.dtype)
            x, y = (samples.x, samples.y) if task.classes is None else labelled(samples.x, samples.y)
            if len(y) or not len(samples.y):
                task.check_samples(x, y)
            return x, y
        x, y = labelled(*as_batch(batch))
        check_targets("the learner", y, "classification", len(self.classes))
        if len(y) != number_of_samples(x):
            raise TaskError(f"{number_of_samples(x)} inputs but {len(y)} labels; give one label per input")
        return x, y

    def _score(self, x: Inputs, y: Tensor, task: Task | None) -> Tensor:
        """Return the number of correct predictions, or the loss times the number of samples."""
        if task is not None and task.classes is None:
            output = Output(task, self.logits(x, task.name), y, slice(0, None))
            with self.model.task_errors(task, x, y), torch.no_grad():
                return checked_loss(output) * len(y)
        labels = y.argmax(dim=1) if y.is_floating_point() else y
        if task is None or self.scenario == "class":
            logits, labels = self.logits(x), labels + (0 if task is None else task.offset)
        else:
            logits = self.logits(x, task.name)
        return ((logits.argmax(dim=1) == labels) & ~logits.isnan().any(dim=1)).sum()  # NaN would count as class 0


def named_classes(task: Task) -> list[tuple[str, str]]:
    """Return (task, name) of every class of a task; the label as text where its classes have no names."""
    names = task.class_names or tuple(map(str, range(task.classes or 0)))
    return [(task.name, name) for name in names]


class JointHeads(nn.Module):
    """The logits of several heads, side by side."""

    def __init__(self, heads: Iterable[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of all heads for a batch of features."""
        return torch.cat([head(features) for head in self.heads], dim=1)


def _like(tensor: Tensor, value: Tensor, requires_grad: bool) -> Tensor:
    """Return a value as a parameter, if the tensor that it stands for is one."""
    return nn.Parameter(value, requires_grad) if isinstance(tensor, nn.Parameter) else value


def _checked_inputs(x: object) -> Inputs:
    """Return inputs as tensors, or raise an error if there is nothing to predict."""
    try:
        inputs = as_inputs(x)
    except DataError as error:
        raise TaskError(f"predictions cannot be made for this x: {error}") from None
    if number_of_samples(inputs) == 0:
        shape = f"has shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else f"is {describe(inputs)}"
        raise TaskError(f"there is nothing to predict: x {shape}")
    return inputs
