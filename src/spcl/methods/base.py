"""Base class of methods, and what a weighting sees."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from spcl.batches import Inputs
from spcl.errors import SpclError
from spcl.losses import Loss
from spcl.memory import Memory, ReplayBatch
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
    layers: Literal["all", "convolutions"] = Field(
        "all", description="what the penalty is on: all convolutions and linear layers, or convolutions only"
    )
    weigh_heads: bool = Field(
        False, description="weigh the gradients of the heads with those of the backbone, as columns of one G"
    )
    head_init: Literal["torch", "glorot"] = Field(
        "torch", description="initialisation of classifiers: PyTorch's of a linear layer, or Glorot's with biases of 0"
    )


@dataclass(frozen=True)
class Gradients:
    """Input of a weighting: names, losses and Gramian of the reduced gradients.

    Attributes:
        names: the tasks in the order they were added, then ``"memory"`` once it holds samples. With ``reduction =
            "mean"``, ``("current", "memory")`` instead.
        losses: their losses; NaN with ``reduction = "sum"``, whose weights are computed before the losses are known.
        gramian: their inner products, float64 on the CPU; None with ``reduction = "sum"``, and where a method with
            ``uses_gramian = False`` is trained without measuring stability.
    """

    names: tuple[str, ...]
    losses: np.ndarray[tuple[int], np.dtype[np.float64]]
    gramian: Tensor | None

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


class LookAhead(Protocol):
    """Access to the model for :meth:`Method.edit`."""

    def loss(self, inputs: Sequence[Inputs]) -> Tensor:
        """Return the summed loss of the samples in evaluation mode, with these inputs instead of the stored ones."""
        ...

    def ahead(self, rate: float) -> AbstractContextManager[None]:
        """Move the shared parameters, within the block, by a step along the current tasks' mean gradient."""
        ...


class Method:
    """A method for parallel continual learning.

    A subclass declares its name and settings and overrides as little as it needs: the losses (:meth:`task_loss`,
    :meth:`memory_loss`), the ``reduction`` of the gradients and the weighting (:meth:`weigh`). A rule that is not a
    weighted sum overrides :meth:`combine` instead. State that lasts from step to step goes through :meth:`state_dict`.

    ``reduction`` says what becomes of the gradients before they are weighed:

    - ``"none"``: every task's gradient and that of memory are weighed separately;
    - ``"mean"``: the mean of the current tasks' gradients is weighed against that of memory;
    - ``"sum"``: the weights are known before the gradients are (``weigh`` gets no Gramian and no losses), so that the
      weighted sum is accumulated and no gradient matrix is held.

    A subclass may also declare: ``uses_gramian = False`` if ``weigh`` reads only the losses; ``draws``, the number of
    replay batches in a step; ``stores_logits`` if memory must store the logits of its samples; ``edits_memory`` if
    :meth:`edit` changes them; ``joint_logits`` if losses cover the classes of all tasks, also task-incrementally;
    ``order``, its place among the methods of its family in lists.

    >>> class Sum(Method):
    ...     name = "plain-sum"
    ...
    ...     def weigh(self, gradients):
    ...         return Weights(torch.ones(len(gradients.names)))
    >>> Sum(alpha=0.1)
    Sum(alpha=0.1)
    """

    name: ClassVar[str]
    family: ClassVar[Literal["MTL", "SCL", "PCL", "TorchJD"]]
    summary: ClassVar[str]
    reference: ClassVar[str]
    reduction: ClassVar[Reduction] = "none"
    uses_gramian: ClassVar[bool] = True
    draws: ClassVar[int] = 1
    stores_logits: ClassVar[bool] = False
    edits_memory: ClassVar[bool] = False
    joint_logits: ClassVar[bool] = False
    order: ClassVar[float]
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    settings: MethodSettings

    def __init__(self, **settings: Any) -> None:
        self.check_declared()
        self.settings = validated(self.Settings, settings, f"method {self.name!r}")

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

    def memory_loss(self, outputs: Sequence[Output], draw: int) -> Tensor:
        """Return the loss on replayed samples, by default the mean over all; ``draw`` counts the step's batches."""
        total = sum(len(output.targets) for output in outputs)
        return torch.stack([self.task_loss(output) * (len(output.targets) / total) for output in outputs]).sum()

    def has_plain_task_loss(self) -> bool:
        """Return whether classifiers are linear and trained by their tasks' losses over their own or all classes."""
        mine = type(self)
        is_plain = mine.task_loss is Method.task_loss and mine.make_head is Method.make_head
        return is_plain and not self.joint_logits

    def has_plain_memory_loss(self) -> bool:
        """Return whether replayed samples are trained by the same plain loss as the tasks' own."""
        return self.has_plain_task_loss() and type(self).memory_loss is Method.memory_loss

    def edit(self, batches: Sequence[ReplayBatch], model: LookAhead) -> Sequence[Inputs]:
        """Return new inputs for replayed samples, which are written back to memory; called if ``edits_memory``."""
        raise NotImplementedError(f"method {self.name!r} has edits_memory = True but does not override edit")

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
        """Receive the losses of the gradients that took part in a step, once it is done."""

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
