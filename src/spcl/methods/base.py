"""Base class of methods, and what a weighting sees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, create_model
from torch import Tensor, nn

from spcl.batches import Inputs
from spcl.errors import SpclError
from spcl.losses import Loss
from spcl.memory import Memory, ReplayBatch
from spcl.methods.replay import REPLAY_LOSSES, LookAhead, ReplayLoss, ReplayLossName, ReplayOptions
from spcl.methods.tasks import Output, Task
from spcl.validation import validated

__all__ = [
    "CURRENT",
    "FAMILIES",
    "MEMORY",
    "Gradients",
    "LookAhead",
    "Loss",
    "Method",
    "MethodSettings",
    "Output",
    "Reduction",
    "Task",
    "Weights",
]

Reduction = Literal["none", "mean", "sum"]

FAMILIES = {"MTL": "Multi-task learning", "SCL": "Serial continual learning", "PCL": "Parallel continual learning"}
"""The families of methods, in the order of lists and tables."""

MEMORY = "memory"
"""The name of the gradient of the replayed samples; no task may have it."""

CURRENT = "current"
"""The name of the mean gradient of the tasks in training, for methods with ``reduction = "mean"``."""


class MethodSettings(BaseModel):
    """Settings that every method has; unknown names and values out of range are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    alpha: float = Field(0.0, ge=0.0, description="α, weight of the DBT orthogonality penalty (paper, eq. 4); 0 is off")
    decoupled: bool = Field(
        False,
        description="add the orthogonality gradient to the update after the weighting, not to every task's gradient",
    )
    adaptive: bool = Field(
        False,
        description="α is relative, per layer: the orthogonality gradient is added to the update after the weighting, "
        "scaled to α times the norm of the layer's update, and to less once the layer is nearly orthogonal",
    )
    layers: Literal["all", "convolutions"] = Field(
        "all", description="what the penalty is on: all convolutions and linear layers, or convolutions only"
    )
    weigh_heads: bool = Field(
        False, description="weigh the gradients of the heads with those of the backbone, as columns of one G"
    )
    head_init: Literal["torch", "glorot"] = Field(
        "torch", description="initialisation of classifiers: PyTorch's of a linear layer, or Glorot's with biases of 0"
    )
    finished_weight: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="class-incrementally, weight of the classes of finished tasks in the cross-entropy of new samples: "
        "the smaller, the less new samples lower their logits; a loss of another kind does not know it",
    )
    replay_loss: ReplayLossName = Field(
        "labels", description="loss on replayed samples, whose options are settings as well"
    )

    @property
    def coupled(self) -> bool:
        """Whether the orthogonality gradient is added to every task's gradient, and not to the update."""
        return not (self.decoupled or self.adaptive)


@dataclass(frozen=True)
class Gradients:
    """Input of a weighting: names, losses and Gramian of the reduced gradients.

    Attributes:
        names: the tasks in the order they were added, then ``"memory"`` once it holds samples. With ``reduction =
            "mean"``, ``("current", "memory")`` instead.
        losses: their losses; NaN with ``reduction = "sum"``, whose weights are computed before the losses are known.
        gramian: their inner products, float64 on the CPU; None with ``reduction = "sum"``, and where a method with
            ``uses_gramian = False`` is trained without measuring stability.
        classes: how many classes each gradient is of, those that memory replays for its own; a task without classes
            counts as one.
        samples: how many samples of the step each gradient is of; of memory, how many were asked for.
        replayed: the names of the tasks that memory replays.
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
        adjusted: the Gramian of the adjusted gradients, if they are other than :math:`w_i g_i`.
    """

    values: Tensor
    adjusted: Tensor | None = None

    def adjusted_gramian(self, gramian: Tensor) -> Tensor:
        """Return the Gramian of the adjusted gradients, given that of the gradients."""
        return self.adjusted if self.adjusted is not None else gramian * torch.outer(self.values, self.values)


class Method:
    """A method for parallel continual learning.

    A method is four choices. Three are settings: the loss on memory, ``replay_loss``, one of ``replay_losses`` by name;
    the weight of finished classes in the loss of new samples, ``finished_weight``; the penalty, ``alpha``. The
    weighting of the gradients is what a subclass says: it declares its name and settings and overrides as little as it
    needs, often only :meth:`weigh`. A rule that is not a weighted sum overrides :meth:`combine` instead. State that
    lasts from step to step goes through :meth:`state_dict`.

    ``reduction`` says what becomes of the gradients before they are weighed:

    - ``"none"``: every task's gradient and that of memory are weighed separately;
    - ``"mean"``: the mean of the current tasks' gradients is weighed against that of memory;
    - ``"sum"``: the weights are known before the gradients are (``weigh`` gets no Gramian and no losses), so that the
      weighted sum is accumulated and no gradient matrix is held.

    A subclass may also override the losses (:meth:`task_loss`, :meth:`memory_loss`; one that reads ``output.value``
    passes its logits through ``output.with_offsets`` to honour ``finished_weight``) and declare: ``uses_gramian =
    False`` if ``weigh`` reads only the losses; ``draws``, the number of replay batches in a step; ``stores_logits`` if
    memory must store the logits of its samples; ``edits_memory`` if :meth:`edit` changes them; ``joint_logits`` if
    losses cover the classes of all tasks, also task-incrementally; ``order``, its place among the methods of its family
    in lists.

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
    replay_losses: ClassVar[Mapping[str, type[ReplayLoss]]] = REPLAY_LOSSES
    joint_logits: ClassVar[bool] = False
    order: ClassVar[float]
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    settings: MethodSettings

    def __init__(self, **settings: Any) -> None:
        self.check_declared()
        replay_loss = settings.get("replay_loss", self.Settings.model_fields["replay_loss"].default)
        kind = self.replay_losses.get(str(replay_loss), ReplayLoss)
        self.settings = validated(_with_options(self.Settings, kind.Options), settings, f"method {self.name!r}")

    @property
    def replay(self) -> ReplayLoss:
        """The loss on replayed samples."""
        return self.replay_losses[self.settings.replay_loss](self.settings)

    @classmethod
    def check_declared(cls) -> None:
        """Refuse a class that declares no name."""
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name:
            raise SpclError(
                f"the method {cls.__module__}.{cls.__qualname__} has the name {name!r}; "
                f"declare a text in the class, e.g. name = {cls.__name__.lower()!r}"
            )

    def check_task(self, task: Task, x: Inputs, memory: Memory | None) -> None:
        """Refuse a task that the method cannot train, given the inputs of its first batch."""
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
        """Return whether the loss on replayed samples is what the coefficients say, with plain losses of tasks."""
        is_plain = type(self).memory_loss is Method.memory_loss and type(self.replay).loss is ReplayLoss.loss
        return is_plain and self.has_plain_task_loss()

    def edit(self, batches: Sequence[ReplayBatch], model: LookAhead) -> Sequence[Inputs]:
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
        """Receive the losses of the gradients that take part in a step, before its update is applied."""

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


@cache
def _with_options(settings: type[MethodSettings], options: type[ReplayOptions]) -> type[MethodSettings]:
    """Return settings with the options of a loss on replayed samples, for which they may have defaults of their own."""
    if issubclass(settings, options) or not options.model_fields:
        return settings
    bases: Any = settings, options
    return cast(type[MethodSettings], create_model(settings.__name__, __base__=bases, __doc__=settings.__doc__))
