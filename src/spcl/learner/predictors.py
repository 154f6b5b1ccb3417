"""What predicts classes: the trained heads, or heads made from the samples in memory without their recency bias."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, pad

from spcl._util.registry import Named, Registry, named_options
from spcl.batches import split
from spcl.engine.model import SharedModel
from spcl.errors import SpclError
from spcl.memory import Memory
from spcl.memory.base import SourceBuffer
from spcl.tasks import Task

StepSamples = list[tuple[Task, Tensor]]
"""The tasks of a step, each with the targets of its batch."""


@dataclass(frozen=True)
class StoredFeatures:
    """The samples of a task that memory holds: features of the averaged weights, if there are any, and labels."""

    features: Tensor
    labels: Tensor


class ClassPredictor(ABC):
    """Makes the heads by which classifiers predict instead of those that were trained.

    A head is a module on the backbone's features, so that predictions, saved models and exports need nothing else.
    """

    needs_memory: ClassVar[bool] = True
    keeps_heads: ClassVar[bool] = False
    """Whether a head is made of a task's samples alone: without any in memory, a task then keeps its latest head."""

    @abstractmethod
    def new_head(self, head: nn.Module, features: int, classes: int) -> nn.Module | None:
        """Return a head whose values :meth:`fit` sets, given the trained head; None to predict by the trained head."""

    def fit(self, heads: Mapping[str, nn.Module], stored: Mapping[str, StoredFeatures], joint: bool) -> None:
        """Set the values of new heads.

        Args:
            heads: of all classifiers, by task, in their order.
            stored: the samples in memory of those that have any.
            joint: whether a sample is compared with the classes of all tasks.
        """
        return

    def observe(self, samples: StepSamples, memory: Memory, memory_batch: int | None) -> None:
        """Receive the targets that a step was trained on."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        return


PREDICTORS: Registry[Callable[..., ClassPredictor]] = Registry("predictor", ClassPredictor)
"""What may predict classes, by name: factories with options."""


@PREDICTORS.register("head")
class TrainedHeads(ClassPredictor):
    """The trained heads."""

    needs_memory: ClassVar[bool] = False

    def new_head(self, head: nn.Module, features: int, classes: int) -> None:
        """Return None."""
        return


SHARPNESS = 16.0
"""Factor of the cosines, which decides probabilities and no prediction."""


class ClassMeanHead(nn.Module):
    r"""Scores :math:`16 \cos(f, \mu_c)` of features f, with one mean per class; −32 for a class without samples."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, features))

    means: Tensor

    def set_means(self, stored: StoredFeatures) -> None:
        """Compute the mean of the normalised features of every class."""
        features, means = normalize(stored.features.to(self.means.dtype), dim=1), torch.zeros_like(self.means)
        means.index_add_(0, stored.labels.to(means.device), features)
        self.means.copy_(normalize(means, dim=1))

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores, of shape (batch, classes)."""
        missing = (self.means == 0.0).all(dim=1)
        cosines = linear(normalize(features, dim=1), self.means.to(features.dtype))
        return SHARPNESS * torch.where(missing, -2.0, cosines)


@PREDICTORS.register("class-means")
class ClassMeans(ClassPredictor):
    r"""The nearest mean of the normalised features of a class's samples in memory, as in iCaRL.

    .. math:: \arg\max_c \cos(f(x), \mu_c)

    Rebuffi et al., *iCaRL: Incremental Classifier and Representation Learning*, CVPR 2017, algorithm 1. Features of
    unit norm are nearest to the mean of unit norm with which they have the largest cosine.
    """

    keeps_heads: ClassVar[bool] = True

    def new_head(self, head: nn.Module, features: int, classes: int) -> nn.Module:
        """Return a head without means."""
        return ClassMeanHead(features, classes)

    def fit(self, heads: Mapping[str, nn.Module], stored: Mapping[str, StoredFeatures], joint: bool) -> None:
        """Compute the means."""
        for name, samples in stored.items():
            head = heads[name]
            assert isinstance(head, ClassMeanHead)
            head.set_means(samples)


class AdjustedHead(nn.Module):
    """A trained head with offsets of its logits."""

    def __init__(self, head: nn.Module, classes: int) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("offsets", torch.zeros(classes))

    offsets: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Return the adjusted logits."""
        logits: Tensor = self.head(features)
        return logits - self.offsets.to(logits.dtype)


@PREDICTORS.register("adjusted")
class AdjustedLogits(ClassPredictor):
    r"""The trained heads, less the logarithm of how frequent a class was in training lately.

    .. math:: \arg\max_c\, z_c(x) - \tau \log \pi_c

    The frequency :math:`\pi_c` is the share of a class among the samples of a step, new ones and those to be expected
    from memory, averaged over steps by :math:`\pi \leftarrow d\, \pi + (1 - d)\, \pi_{step}` with the decay d. So
    classes that were trained rarely of late are not predicted rarely for that. A method whose ``finished_weight`` is
    below 1 corrects that bias in training already; both together overcorrect.

    Menon et al., *Long-tail Learning via Logit Adjustment*, ICLR 2021, eq. 9.

    Args:
        strength: τ.
        decay: d.
    """

    def __init__(self, strength: float = 1.0, decay: float = 0.99) -> None:
        if strength < 0.0 or not 0.0 <= decay < 1.0:
            raise SpclError(
                f"strength is {strength} and decay {decay}; give a strength of at least 0 and a decay from 0 to below 1"
            )
        self.strength = strength
        self.decay = decay
        self._frequencies: dict[str, Tensor] = {}

    def new_head(self, head: nn.Module, features: int, classes: int) -> nn.Module:
        """Return a copy of the trained head without offsets."""
        return AdjustedHead(copy.deepcopy(head), classes)

    def fit(self, heads: Mapping[str, nn.Module], stored: Mapping[str, StoredFeatures], joint: bool) -> None:
        """Set the offsets, which are 0 for classes that were never trained."""
        known = {name: value for name, value in self._frequencies.items() if name in heads}
        total = sum(float(value.sum()) for value in known.values())
        for name, frequencies in known.items():
            head, shares = heads[name], frequencies / total
            assert isinstance(head, AdjustedHead)
            offsets = torch.where(shares > 0.0, self.strength * shares.log(), 0.0)
            head.offsets[: len(offsets)].copy_(offsets)

    def observe(self, samples: StepSamples, memory: Memory, memory_batch: int | None) -> None:
        """Average the frequencies of the classes in a step; of replayed samples, those to be expected."""
        counts: dict[str, Tensor] = {}
        for task, y in samples:
            if task.classes is not None:
                _add(counts, task.name, _counts(task, y))
        stored = {name: memory.buffers[name] for name in memory.replayable_sources()}
        replayed = min(memory_batch or max(len(y) for _, y in samples), len(memory)) / max(len(memory), 1)
        for buffer in stored.values():
            if buffer.labelled:
                labels = torch.from_numpy(buffer.labels[: buffer.size])
                _add(counts, buffer.task, replayed * torch.bincount(labels, minlength=buffer.classes).double())
        total = sum(float(count.sum()) for count in counts.values())
        for name in self._frequencies | counts:  # a set of names would have an order of its own in every process
            before, now = self._frequencies.get(name), counts.get(name)
            if before is not None and now is not None:  # classes may have been added
                before = pad(before, (0, len(now) - len(before)))
            both = [] if before is None else [self.decay * before]
            both += [] if now is None else [(1.0 - self.decay) * now / total]
            self._frequencies[name] = torch.stack(both).sum(dim=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the frequencies by task."""
        return {"frequencies": dict(self._frequencies)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        self._frequencies = {name: value.cpu() for name, value in state["frequencies"].items()}


def _add(counts: dict[str, Tensor], name: str, more: Tensor) -> None:
    counts[name] = counts[name] + more if name in counts else more


def _counts(task: Task, y: Tensor) -> Tensor:
    """Return how many samples every class of a task has in a batch; parts of them where targets are probabilities."""
    if y.is_floating_point():
        return y.double().sum(dim=0).cpu()
    return torch.bincount(y.cpu(), minlength=task.classes or 0).double()


@PREDICTORS.register("balanced-heads")
@dataclass(frozen=True)
class BalancedHeads(ClassPredictor):
    r"""Copies of the heads, fine-tuned on all of memory by ``steps`` of Adam while the backbone stays.

    .. math:: \min \tfrac1C \sum_c \mathbb E_{x \in c}[-\log p_c(x)]

    Every class counts alike, whatever the number of its samples. Class-incrementally, p is the softmax over the classes
    of all tasks that have samples in memory, else over the classes of the sample's task.
    """

    steps: int = 50
    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        if self.steps < 1 or self.learning_rate <= 0.0:
            raise SpclError(f"{self} cannot be used; give at least one step and a positive learning rate")

    def new_head(self, head: nn.Module, features: int, classes: int) -> nn.Module:
        """Return a copy of the trained head."""
        return copy.deepcopy(head)

    def fit(self, heads: Mapping[str, nn.Module], stored: Mapping[str, StoredFeatures], joint: bool) -> None:
        """Fine-tune the heads of the tasks that have stored samples."""
        groups = [list(stored)] if joint else [[name] for name in stored]
        for names in groups:
            if names:
                self._fine_tune([heads[name] for name in names], [stored[name] for name in names])

    def _fine_tune(self, heads: Sequence[nn.Module], stored: Sequence[StoredFeatures]) -> None:
        features = torch.cat([each.features for each in stored])
        with torch.no_grad():
            sizes = [head(features[:1]).shape[1] for head in heads]
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        pairs = zip(stored, offsets, strict=True)
        targets = torch.cat([each.labels + offset for each, offset in pairs]).to(features.device)
        weights = _balanced_weights(targets)
        parameters = [parameter.requires_grad_() for head in heads for parameter in head.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        for _ in range(self.steps):
            with torch.enable_grad():
                losses = cross_entropy(torch.cat([head(features) for head in heads], dim=1), targets, reduction="none")
                (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


def _balanced_weights(targets: Tensor) -> Tensor:
    """Return the weight of every sample, with the same sum for every class that there is, and 1 in all."""
    counts = torch.bincount(targets)
    return 1.0 / ((counts > 0).sum() * counts[targets])


BATCH = 1024


class PredictionHeads:
    """The heads by which the classifiers of a model predict.

    They are made again after a step, and once a task has begun or ended.

    Args:
        predict_by: one of ``PREDICTORS``, by name or by name and options.
        memory: the samples that heads are made from.

    Attributes:
        observes: whether the heads depend on what is trained, so that :meth:`observe` must be called.
    """

    def __init__(self, predict_by: Named, memory: Memory | None) -> None:
        self._name, _ = named_options(predict_by, "predictor")
        self._predictor = PREDICTORS.make(predict_by)
        self.observes = memory is not None and self._predictor.needs_memory
        self._memory = memory
        self._heads: dict[str, nn.Module] = {}
        self._version: object = None

    @property
    def are_trained(self) -> bool:
        """Whether they are the trained heads themselves."""
        return not self._predictor.needs_memory

    def check_memory(self) -> None:
        """Refuse to train without the memory that heads are made from; a loaded model predicts without."""
        if self._predictor.needs_memory and self._memory is None:
            raise SpclError(f"predict_by is {self._name!r}, which needs the samples of a memory; pass memory=")

    @contextmanager
    def applied(self, model: SharedModel) -> Iterator[None]:
        """Let classifiers have these heads within the block, in which the model must be evaluating."""
        self._refresh(model)
        before = {task: task.head for task in model.classifiers if task.name in self._heads}
        try:
            for task in before:
                task.head = self._heads[task.name]
            yield
        finally:
            for task, head in before.items():
                task.head = head

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the heads, and convert their floating-point numbers; where there is a memory, they are made again."""
        for head in self._heads.values():
            head.to(device, dtype)
        self._version = None

    def observe(self, samples: StepSamples, memory_batch: int | None) -> None:
        """Receive the targets that a step was trained on."""
        if self._memory is not None and samples:
            self._version = None
            self._predictor.observe(samples, self._memory, memory_batch)

    def _refresh(self, model: SharedModel) -> None:
        version = self._current_version(model)
        if self._memory is None or self.are_trained or version == self._version:
            return
        buffers = self._memory.buffers
        stored = {
            task.name: _stored_features(model, task, buffers)
            for task in model.classifiers
            if task.head is not None and any(name in buffers and buffers[name].size for name in task.sources)
        }
        heads = self._new_heads(model)
        self._predictor.fit(heads, stored, model.has_joint_logits)
        if self._predictor.keeps_heads:
            heads |= {name: head for name, head in self._heads.items() if name not in stored}
        self._heads, self._version = heads, version

    def _current_version(self, model: SharedModel) -> object:
        sources = [(source.name, source.finished) for source in model.sources.values()]
        return sources, [(task.name, task.classes, task.head is None) for task in model.classifiers]

    def _new_heads(self, model: SharedModel) -> dict[str, nn.Module]:
        heads = {}
        for task in model.classifiers:
            if task.head is not None and task.classes is not None and model.feature_dim is not None:
                head = self._predictor.new_head(task.head, model.feature_dim, task.classes)
                if head is not None:
                    heads[task.name] = head.to(model.device).eval().requires_grad_(False)
        return heads

    def state_dict(self) -> dict[str, Any]:
        """Return the present heads by task, and the state of what makes them."""
        heads = {name: head.state_dict() for name, head in self._heads.items()}
        return {"heads": heads, "predictor": self._predictor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], model: SharedModel, are_current: bool) -> None:
        """Restore from :meth:`state_dict`; unless heads are current, they are made again when they are needed."""
        new = self._new_heads(model)
        for name, values in state["heads"].items():
            new[name].load_state_dict(values)
        self._heads = {name: new[name] for name in state["heads"]}
        self._predictor.load_state_dict(state["predictor"])
        self._version = self._current_version(model) if are_current else None


def _stored_features(model: SharedModel, task: Task, buffers: Mapping[str, SourceBuffer]) -> StoredFeatures:
    """Return features and labels of the samples of a task in memory."""
    features, labels = [], []
    for name, source in task.sources.items():
        buffer = buffers.get(name)
        if buffer is not None and buffer.size:
            inputs = buffer.take_inputs(np.arange(buffer.size))
            with torch.no_grad(), model.precision():
                features += [model.features(part, source.encoder) for part in split(inputs, BATCH)]
            labels.append(torch.from_numpy(buffer.labels[: buffer.size]).to(model.device))
    return StoredFeatures(torch.cat(features).to(model.dtype), torch.cat(labels))
