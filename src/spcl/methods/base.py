"""Base class of methods, and what it is given and gives: outputs of the model, gradients, weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl._util.validation import validated
from spcl.batches import Inputs
from spcl.errors import SpclError
from spcl.losses import CrossEntropy, Loss
from spcl.memory import Memory, ReplayBatch
from spcl.tasks import Task

if TYPE_CHECKING:
    from spcl.methods.replay import LookAhead, ReplayLoss
    from spcl.methods.settings import MethodSettings

__all__ = [
    "CURRENT",
    "FAMILIES",
    "MEMORY",
    "Gradients",
    "Loss",
    "Method",
    "Output",
    "Reduction",
    "Task",
    "Weights",
    "squared_distances",
]

Reduction = Literal["none", "mean", "sum"]

FAMILIES = {"MTL": "Multi-task learning", "SCL": "Serial continual learning", "PCL": "Parallel continual learning"}
"""The families of methods, in the order of lists and tables."""

MEMORY = "memory"
"""The name of the gradient of the replayed samples; no task may have it."""

CURRENT = "current"
"""The name of the mean gradient of the tasks in training, for methods with ``reduction = "mean"``."""


@dataclass(frozen=True)
class Output:
    """The model's output for samples of one task.

    Attributes:
        task: the task.
        value: for a classifier the logits (class-incremental: of all classes seen, task-incremental: of its own), else
            the output of its head.
        targets: the labels as indices into the logits, or their probabilities; else the targets as they came.
        own: the columns of ``value`` that are the task's own classes.
        stored: the logits stored in memory with these samples, NaN for classes added later; None if there are none.
        offsets: added to the logits in cross-entropy, one per class; None for none.
    """

    task: Task
    value: Tensor
    targets: Tensor
    own: slice
    stored: Tensor | None = None
    offsets: Tensor | None = None

    def loss(self) -> Tensor:
        """Return the task's loss on these samples."""
        loss = self.task.loss
        if isinstance(loss, CrossEntropy):
            return loss(self.value, self.targets, self.own, self.offsets)
        return loss(self.with_offsets(self.value) if loss is cross_entropy else self.value, self.targets)

    def with_offsets(self, logits: Tensor) -> Tensor:
        """Return logits as cross-entropy compares them."""
        return logits if self.offsets is None else logits + self.offsets


def stored_distances(output: Output) -> Tensor:
    """Return the squared distance of every sample to its stored logits; 0 for a sample without stored logits."""
    value, stored = output.value, output.stored
    if stored is None:
        stored = torch.full_like(value, math.nan)
    if output.task.classes is not None:
        value = value[:, : stored.shape[1]]  # classes of later tasks were added to the right
    return squared_distances(value.reshape(len(value), -1), stored.reshape(len(value), -1))


def squared_distances(value: Tensor, stored: Tensor) -> Tensor:
    """Return the mean of every row's squared differences where ``stored`` is not NaN; 0 where all of it is NaN.

    >>> squared_distances(torch.tensor([[1.0, 5.0], [1.0, 5.0]]), torch.tensor([[3.0, math.nan], [math.nan, math.nan]]))
    tensor([4., 0.])
    """
    known = ~stored.isnan()
    return torch.where(known, value - stored, 0.0).square().sum(dim=1) / known.sum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class Gradients:
    """Input of a weighting: names, losses and Gramian of the reduced gradients.

    Attributes:
        names: the sources in the order they were added, then ``"memory"`` once it holds samples. With ``reduction =
            "mean"``, ``("current", "memory")`` instead.
        losses: their losses; NaN with ``reduction = "sum"``, whose weights are computed before the losses are known.
        gramian: their inner products, float64 on the CPU; None with reduction ``"sum"``, and for ``uses_gramian =
            False`` unless stability is measured.
        classes: the number of classes behind each gradient; for memory, the classes of all tasks that it replays. A
            task without classes counts as one class.
        samples: the number of samples behind each gradient; for memory, the number asked for.
        replayed: the names of the sources that memory replays.
    """

    names: tuple[str, ...]
    losses: np.ndarray[tuple[int], np.dtype[np.float64]]
    gramian: Tensor | None
    classes: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    replayed: tuple[str, ...] = ()

    def known_gramian(self) -> Tensor:
        """Return the Gramian, for methods that always have one."""
        return cast(Tensor, self.gramian)


@dataclass(frozen=True)
class Weights:
    r"""The result of a weighting.

    Attributes:
        values: one weight per gradient; the update is :math:`\sum_i w_i g_i`.
        adjusted: the Gramian of the adjusted gradients; None if they are :math:`w_i g_i`.
    """

    values: Tensor
    adjusted: Tensor | None = None

    def adjusted_gramian(self, gramian: Tensor) -> Tensor:
        """Return the Gramian of the adjusted gradients, given the Gramian of the gradients."""
        return self.adjusted if self.adjusted is not None else gramian * torch.outer(self.values, self.values)


class _Later:
    """A class attribute imported when it is read, because settings need pydantic, which is slow to import."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return getattr(import_module(f"spcl.methods.{self._module}"), self._name)


def _later(module: str, name: str) -> Any:
    return _Later(module, name)


class Method:
    """A method for parallel continual learning.

    A method is four choices. Three are settings: the loss on memory, ``replay_loss``, one of ``replay_losses`` by name;
    the weight of finished classes in the loss of new samples, ``finished_weight``; the penalty, ``alpha``. The fourth
    is the weighting of the gradients, which a subclass defines: it declares its name and settings and overrides as
    little as it needs, often only :meth:`weigh`. A rule that is not a weighted sum overrides :meth:`combine` instead.
    State that lasts from step to step goes through :meth:`state_dict`.

    ``reduction`` says how gradients are reduced before they are weighed:

    - ``"none"``: every task's gradient and the gradient of memory are weighed separately;
    - ``"mean"``: the mean of the current tasks' gradients is weighed against the gradient of memory;
    - ``"sum"``: the weights are known before the gradients are (``weigh`` gets no Gramian and no losses), so that the
      weighted sum is accumulated and no gradient matrix is held.

    A subclass may also override the losses (:meth:`task_loss`, :meth:`memory_loss`; one that reads ``output.value``
    passes its logits through ``output.with_offsets`` to honour ``finished_weight``) and declare: ``uses_gramian =
    False`` if ``weigh`` reads only the losses; ``draws``, the number of replay batches in a step; ``stores_logits`` if
    memory must store the logits of its samples; ``edits_memory`` if :meth:`edit` changes them; ``joint_logits`` if
    losses cover the classes of all tasks, also task-incrementally; ``watches_updates`` if :meth:`after_update` needs
    the losses after the update, at the price of another forward pass over every batch; ``order``, its place among the
    methods of its family in lists.

    >>> class Sum(Method):
    ...     name = "plain-sum"
    ...
    ...     def weigh(self, gradients):
    ...         return Weights(torch.ones(len(gradients.names)))
    >>> Sum(alpha=0.1)
    Sum(alpha=0.1)
    >>> Sum(replay_loss="logits", logit_weight=0.2)
    Sum(logit_weight=0.2, replay_loss='logits')
    """

    name: ClassVar[str]
    family: ClassVar[Literal["MTL", "SCL", "PCL", "TorchJD"]]
    summary: ClassVar[str]
    reference: ClassVar[str]
    reduction: ClassVar[Reduction] = "none"
    uses_gramian: ClassVar[bool] = True
    replay_losses: ClassVar[Mapping[str, type["ReplayLoss"]]] = _later("replay", "REPLAY_LOSSES")
    joint_logits: ClassVar[bool] = False
    watches_updates: ClassVar[bool] = False
    order: ClassVar[float]
    Settings: ClassVar[type["MethodSettings"]] = _later("settings", "MethodSettings")
    settings: "MethodSettings"

    def __init__(self, **settings: Any) -> None:
        from spcl.methods.replay import ReplayLoss
        from spcl.methods.settings import with_options

        self.check_declared()
        replay_loss = settings.get("replay_loss", self.Settings.model_fields["replay_loss"].default)
        kind = self.replay_losses.get(str(replay_loss), ReplayLoss)
        self.settings = validated(with_options(self.Settings, kind.Options), settings, f"method {self.name!r}")

    @property
    def replay(self) -> "ReplayLoss":
        """The loss on replayed samples."""
        known: ReplayLoss | None = vars(self).get("_replay")
        if known is None or known.settings is not self.settings:
            known = self._replay = self.replay_losses[self.settings.replay_loss](self.settings)
        return known

    @classmethod
    def check_declared(cls) -> None:
        """Raise an error if the class declares no name."""
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name:
            raise SpclError(
                f"the method {cls.__module__}.{cls.__qualname__} has the name {name!r}; "
                f"declare a text in the class, e.g. name = {cls.__name__.lower()!r}"
            )

    def check_task(self, task: Task, x: Inputs, memory: Memory | None) -> None:
        """Raise an error if the method cannot train a task, given the inputs of its first batch."""
        self.replay.check_task(f"method {self.name!r}", task, x, memory)

    def make_head(self, features: int, classes: int) -> nn.Module:
        """Return the head of a classifier."""
        head = nn.Linear(features, classes)
        if self.settings.head_init == "glorot":
            nn.init.xavier_uniform_(head.weight)
            nn.init.zeros_(head.bias)
        return head

    def task_loss(self, output: Output) -> Tensor:
        """Return the loss of a task on its own batch."""
        return output.loss()

    @property
    def draws(self) -> int:
        """The number of replay batches in a step."""
        return self.replay.draws

    @property
    def stores_logits(self) -> bool:
        """Whether memory must store the logits of its samples."""
        return self.replay.stores_logits

    @property
    def edits_memory(self) -> bool:
        """Whether :meth:`edit` changes the samples of memory."""
        return self.replay.edits_memory

    def memory_loss(self, outputs: Sequence[Output], draw: int) -> Tensor:
        """Return the loss on replayed samples; ``draw`` counts the step's batches."""
        return self.replay.loss(outputs, draw, self.task_loss)

    def has_plain_task_loss(self) -> bool:
        """Return whether classifiers are linear and trained by their tasks' losses over their own or all classes."""
        mine = type(self)
        is_plain = mine.task_loss is Method.task_loss and mine.make_head is Method.make_head
        return is_plain and not self.joint_logits

    def has_plain_memory_loss(self) -> bool:
        """Return whether memory's loss is the weighted sum given by ``coefficients``, with plain task losses."""
        from spcl.methods.replay import ReplayLoss

        is_plain = type(self).memory_loss is Method.memory_loss and type(self.replay).loss is ReplayLoss.loss
        return is_plain and self.has_plain_task_loss()

    def edit(self, batches: Sequence[ReplayBatch], model: "LookAhead") -> Sequence[Inputs]:
        """Return new inputs for replayed samples, which are written back to memory; called if ``edits_memory``."""
        return self.replay.edit(batches, model)

    def weigh(self, gradients: Gradients) -> Weights:
        """Return one weight per gradient."""
        raise NotImplementedError(f"method {self.name!r} overrides neither weigh nor combine")

    @property
    def elementwise(self) -> bool:
        """Whether the method overrides :meth:`combine`, because its rule is not a weighted sum."""
        return type(self).combine is not Method.combine

    def combine(self, gradients: Tensor) -> Tensor:
        """Return the update from the T×n gradients, which may be overwritten; called if overridden."""
        raise NotImplementedError(f"method {self.name!r} weighs gradients and does not combine them itself")

    def after_step(self, losses: Mapping[str, float]) -> None:
        """Receive the losses of the step's gradients, just before the update."""

    def after_update(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Receive the losses of the same batches before and after an update; called if ``watches_updates``.

        Both are computed in training mode and on the same augmented inputs; dropout differs. Losses after the update
        may be non-finite. An error here leaves the update made.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data and tensors; tensors that later steps change in place must be copies."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        if state:
            raise SpclError(f"method {self.name!r} keeps no state, but was given {sorted(state)}")

    def __repr__(self) -> str:
        changed = self.settings.model_dump(exclude_defaults=True) if hasattr(self, "settings") else {}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in changed.items())})"
