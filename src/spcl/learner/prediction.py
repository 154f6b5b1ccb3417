"""Predictions of a shared model with a head per task, their evaluation, and the model as a plain module."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

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
from spcl.learner.checks import OneCallAtATime, find_sources, find_task, labelled, samples_of
from spcl.learner.parameters import uncompiled
from spcl.learner.predictors import PredictionHeads
from spcl.methods.base import Output
from spcl.options import Scenario
from spcl.tasks import Task, TaskSource, check_targets

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
    def sources(self) -> dict[str, TaskSource]:
        """All sources ever added, in that order."""
        return self.model.sources

    @property
    def active_tasks(self) -> list[str]:
        """The tasks that are not finished."""
        return [name for name, task in self.tasks.items() if not task.finished]

    @property
    def active_sources(self) -> list[str]:
        """The sources that have not ended."""
        return [name for name, source in self.sources.items() if not source.finished]

    @property
    def classes(self) -> list[tuple[str, int]]:
        """(task, label) of every class seen, in the order of class-incremental predictions."""
        return [(task.name, label) for task in self.model.classifiers for label in range(task.classes or 0)]

    @property
    def class_names(self) -> list[tuple[str, str]]:
        """(task, name) of every class in :attr:`classes`; the label as text where a task's classes have no names."""
        return [pair for task in self.model.classifiers for pair in named_classes(task)]

    def predict(
        self,
        x: InputsLike,
        task: str | None = None,
        *,
        source: str | None = None,
        encoder: nn.Module | None = None,
        batch_size: int = PREDICT_BATCH,
    ) -> Tensor:
        """Return labels for inputs, on the model's device.

        With ``task``, that task's labels (or the output of its own head). Without, class-incremental: indices into
        :attr:`classes`, over all classes seen; domain-incremental: the labels of the one task.

        With ``source``, inputs pass that source's encoder, and the task is the source's, unless predictions are
        class-incremental. With ``encoder`` they pass that module: the way for somebody who was never seen. With
        neither, they pass the encoder that all sources of the task share; encoders made by name are skipped, since they
        start as the identity, unless the task has a single source, of its own name.

        Inputs must have the shape and type that the task was trained on; floating-point numbers are converted. An input
        without a prediction, because its scores are NaN, raises an error: :meth:`logits` gives the scores as they are.
        """
        asked = self._asked(task, source, encoder)
        scores = self._scores(x, asked, batch_size)
        return scores if asked.task is not None and asked.task.classes is None else scores.argmax(dim=1)

    def predict_proba(
        self,
        x: InputsLike,
        task: str | None = None,
        *,
        source: str | None = None,
        encoder: nn.Module | None = None,
        batch_size: int = PREDICT_BATCH,
    ) -> Tensor:
        """Return the probabilities of a classifier's classes, or of all classes seen: the softmax of the logits."""
        asked = self._asked(task, source, encoder)
        if asked.task is not None and asked.task.classes is None:
            name = asked.task.name
            raise TaskError(f"task {name!r} has a head of its own and no classes; use predict(x, {name!r})")
        return self._scores(x, asked, batch_size).softmax(dim=1)

    def logits(
        self,
        x: InputsLike,
        task: str | None = None,
        *,
        source: str | None = None,
        encoder: nn.Module | None = None,
        batch_size: int = PREDICT_BATCH,
    ) -> Tensor:
        """Return the scores behind :meth:`predict`, of ``batch_size`` inputs at a time.

        They may be NaN, and the inputs may be any that the network takes.
        """
        return self._logits(x, self._asked(task, source, encoder), batch_size)

    def _logits(self, x: InputsLike, asked: "Asked", batch_size: int = PREDICT_BATCH) -> Tensor:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise SpclError(f"batch_size is {batch_size!r}; give a positive whole number")
        inputs, _ = self._fitted(_checked_inputs(x), asked)
        heads, reading = self._prediction_heads(), self._reading("a prediction")
        owner = asked.source or asked.task
        with reading, self.model.source_errors(owner, inputs), torch.no_grad(), self.averaged_weights(), heads:
            parts = split(inputs, batch_size)
            return torch.cat([self.model.logits(part, asked.task, asked.encoder) for part in parts])

    def logits_to_store(self, x: Inputs, task: Task | None, encoder: nn.Module | None) -> Tensor:
        """Return the logits of one batch of samples as in training: of the trained heads, whatever predicts."""
        own = batch_statistics(self.model.modules()) if number_of_samples(x) > 1 else nullcontext()
        with torch.no_grad(), self.averaged_weights(), own:
            return self.model.logits(x, task, encoder)

    def evaluate(
        self,
        loader: Iterable[BatchLike],
        task: str | None = None,
        *,
        source: str | None = None,
        encoder: nn.Module | None = None,
    ) -> float:
        """Return the accuracy of a classifier, from 0 to 1, or the mean loss of another task, on (inputs, targets).

        Labels are the task's, or probabilities: then the most probable class counts. A class-incremental prediction is
        correct if it is the right class among all classes seen; without ``task`` and ``source``, labels are indices
        into :attr:`classes`. Samples without a label (−100, or NaN) are left out, and where the model gives NaN, the
        prediction is wrong. The mean loss is over the samples, of a loss that is itself a mean over its batch.
        ``source`` and ``encoder`` are as for :meth:`predict`.
        """
        asked = self._asked(task, source, encoder, labels=True)
        total, count = torch.zeros((), dtype=torch.float64, device=self.model.device), 0
        for batch in loader:
            x, y = self._checked(batch, asked)
            if not len(y):  # no sample has a label
                continue
            total += self._score(x, y.to(self.model.device), asked)
            count += len(y)
        if count == 0:
            raise TaskError(
                "there is nothing to evaluate: the loader gives no batch with labels; note that an iterator is used up"
            )
        return float(total) / count

    def module(
        self, task: str | None = None, *, source: str | None = None, encoder: nn.Module | None = None
    ) -> nn.Module:
        """Return encoder, backbone and head of a task as a plain module; without a task, with the heads of all classes.

        Which encoder and task, ``source`` and ``encoder`` say as for :meth:`predict`.

        It shares parameters (averaged weights, where there are any) and buffers with this model, so that it follows
        further training, but has modes of its own: it is in evaluation mode. It computes in the precision of its
        parameters, without autocast, and takes inputs on their device. Tasks that are added later are not part of it.
        If ``predict_by`` is not ``"head"``, it has the current prediction heads, which later training does not change.
        """
        refuse_sharded(self.model.backbone, "copied")
        asked = self._asked(task, source, encoder)
        tasks = self.model.classifiers if asked.task is None else [asked.task]
        with self._reading("module"):
            heads = [self._sharing_copy(head) for head in self.present_heads(tasks)]
            backbone = self._sharing_copy(uncompiled(self.model.backbone))
            front = [] if asked.encoder is None else [("encoder", self._sharing_copy(asked.encoder))]
        top = ("heads", JointHeads(heads)) if asked.task is None else ("head", heads[0])
        return nn.Sequential(OrderedDict([*front, ("backbone", backbone), top])).eval()

    def snapshot(self) -> "Predictor":
        """Return a predictor with copies of the weights and heads that predict now, which follow no training."""
        refuse_sharded(self.model.backbone, "copied")
        with self._reading("snapshot"):
            averages = {} if self._average is None else self._average.averages
            memo: dict[int, Any] = {id(each): _like(each, value.clone(), False) for each, value in averages.items()}
            trained = [task for task in self.tasks.values() if task.head is not None]
            all_sources = [source for task in trained for source in task.sources.values()]
            sources = [source for source in self.sources.values() if source in all_sources]
            parts = (uncompiled(self.model.backbone), trained, sources, self.present_heads(trained))
            backbone, tasks, sources, heads = copy.deepcopy(parts, memo)
        model = SharedModel(backbone, self.scenario, nn.Linear, 0, self.model.autocast)
        for task, head in zip(tasks, heads, strict=True):
            task.head = head
            model.tasks[task.name] = task
        for each in sources:
            model.add_source(each)
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

    def _asked(self, task: str | None, source: str | None, encoder: nn.Module | None, labels: bool = False) -> "Asked":
        """Return what is asked by the arguments of a prediction.

        Args:
            task: the name of a task, or None.
            source: the name of a source, or None.
            encoder: a module, or None.
            labels: whether labels count the classes of the source's task, also class-incrementally.
        """
        asked = None if task is None else find_task(self.tasks, task)
        brings = None if source is None else self._brings(source, asked)
        if brings is not None and (encoder is not None or asked not in (None, brings.task)):
            other = "an encoder of its own" if encoder is not None else f"the task {task!r}"
            raise TaskError(f"{brings.words} was given with {other}; give one of the two")
        if encoder is not None and not isinstance(encoder, nn.Module):
            raise TaskError(f"the encoder must be a torch.nn.Module, but it is {encoder!r:.80}")
        if asked is None and brings is not None and (labels or self.scenario != "class"):
            asked = brings.task
        if asked is None and self.scenario == "domain" and self.tasks:
            asked = next(iter(self.tasks.values()))
        if asked is None:
            self._check_all_classes()
        if brings is not None:
            return Asked(asked, brings, brings.encoder)
        return Asked(asked, None, self._common_encoder(asked) if encoder is None else encoder, encoder is not None)

    def _brings(self, source: str, task: Task | None) -> TaskSource:
        """Return the source of this name; of one that answers several tasks, the part that answers the given one."""
        parts = find_sources(self.model, source)
        if task is None and len(parts) > 1 and self.scenario != "class":
            raise TaskError(f"source {source!r} answers {[each.task.name for each in parts]}; pass task=")
        return next((each for each in parts if each.task is task), parts[0])

    def _check_all_classes(self) -> None:
        """Raise an error unless predictions may be of all classes seen."""
        if self.scenario == "task":
            raise TaskError(f"a task-incremental learner needs the task of x; pass task=, one of {list(self.tasks)}")
        if not self.model.classifiers:
            raise TaskError("there is no classification task yet; call add_task first")

    def _common_encoder(self, task: Task | None) -> nn.Module | None:
        """Return the encoder for inputs of no source in particular."""
        if not self.model.encoders:
            return None
        sources = self._sources_of(task)
        if task is not None and list(task.sources) == [task.name]:
            return sources[0].encoder
        if all(each.encoder is None or each.encoder_name is not None for each in sources):
            return None
        encoders = {each.encoder for each in sources}
        if len(encoders) > 1:
            whose = "there are" if task is None else f"task {task.name!r} has"
            raise TaskError(
                f"{whose} sources with different encoders, {[each.name for each in sources]}; pass source=, or the "
                f"module as encoder="
            )
        return encoders.pop()

    def _sources_of(self, task: Task | None) -> list[TaskSource]:
        """Return the sources of a task, or of all classifiers."""
        tasks = self.model.classifiers if task is None else [task]
        return [source for each in tasks for source in each.sources.values()]

    def _scores(self, x: InputsLike, asked: "Asked", batch_size: int) -> Tensor:
        """Return logits of inputs of the kind that was trained on, or raise an error, also where they are NaN."""
        inputs, fits = self._fitted(_checked_inputs(x), asked)
        if not fits:
            learned = ", ".join(
                f"{each.name!r}: {each.signature[0]}" for each in self._askable(asked) if each.signature
            )
            raise TaskError(
                f"x has samples of {describe(inputs, 1)}, but the learner was trained on others ({learned}); give "
                f"inputs of the same shape and type as in training"
            )
        scores = self._logits(inputs, asked, batch_size)
        wrong = scores.isnan().flatten(1).any(dim=1) if scores.ndim > 1 else scores.isnan()
        if bool(wrong.any()):  # the largest of NaN would be class 0
            raise TaskError(
                f"the predictions for {int(wrong.sum())} of {len(wrong)} inputs are not finite, but NaN (first: input "
                f"{int(wrong.nonzero()[0])}); give inputs that are finite and not too large, or look at logits()"
            )
        return scores

    def _askable(self, asked: "Asked") -> list[TaskSource]:
        """Return the sources whose samples a prediction is for."""
        if asked.source is not None:
            return [asked.source]
        sources = self._sources_of(asked.task)
        if asked.is_given:
            return [each for each in sources if each.encoder is asked.encoder]
        return sources

    def _fitted(self, x: Inputs, asked: "Asked") -> tuple[Inputs, bool]:
        """Return inputs in the floating-point type of a source, and whether they are of its kind.

        A source that has seen no data takes any kind, and so does an encoder that no source has.
        """
        sources = self._askable(asked)
        for each in sources:
            kind = None if each.signature is None else each.signature[0]
            fitting = converted(x, kind, self.model.dtype)
            if kind is None or describe(fitting, 1) == kind:
                return fitting, True
        return (x, False) if sources else (converted(x, None, self.model.dtype), True)

    def _checked(self, batch: BatchLike, asked: "Asked") -> Batch:
        """Return the samples of a batch that have labels, or raise an error unless they fit what is asked."""
        source = asked.source
        if source is None and asked.task is not None and not asked.is_given:
            sources = list(asked.task.sources.values())
            source = sources[0] if len({each.signature for each in sources}) == 1 else None
        if source is not None:
            samples = samples_of(source, batch, self.model.dtype)
            x, y = labelled(samples.x, samples.y)
            if len(y) or not len(samples.y):
                source.check_samples(x, y)
            return x, y
        x, y = labelled(*as_batch(batch))
        if asked.task is None:
            check_targets("the learner", y, "classification", len(self.classes))
        elif asked.task.classes is not None:
            check_targets(asked.task.words, y, "classification", asked.task.classes)
        if len(y) != number_of_samples(x):
            raise TaskError(f"{number_of_samples(x)} inputs but {len(y)} labels; give one label per input")
        return x, y

    def _score(self, x: Inputs, y: Tensor, asked: "Asked") -> Tensor:
        """Return the number of correct predictions, or the loss times the number of samples."""
        task = asked.task
        if task is not None and task.classes is None:
            output = Output(task, self._logits(x, asked), y, slice(0, None))
            with self.model.source_errors(asked.source or task, x, y), torch.no_grad():
                return checked_loss(output) * len(y)
        labels = y.argmax(dim=1) if y.is_floating_point() else y
        if task is not None and self.scenario == "class":
            labels = labels + task.offset
            asked = asked._replace(task=None)
        logits = self._logits(x, asked)
        return ((logits.argmax(dim=1) == labels) & ~logits.isnan().any(dim=1)).sum()  # NaN would count as class 0


def named_classes(task: Task) -> list[tuple[str, str]]:
    """Return (task, name) of every class of a task; the label as text where its classes have no names."""
    names = task.class_names or tuple(map(str, range(task.classes or 0)))
    return [(task.name, name) for name in names]


class Asked(NamedTuple):
    """What a prediction is of.

    Attributes:
        task: the task, or None for all classes seen.
        source: whose inputs they are, or None.
        encoder: the encoder that they pass first, or None.
        is_given: whether the encoder was given, and not found.
    """

    task: Task | None
    source: TaskSource | None
    encoder: nn.Module | None
    is_given: bool = False


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
