"""Interface of an engine: what a step asks for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl.batches import Inputs
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples
from spcl.engine.reduction import ReductionPlan
from spcl.engine.snapshot import BufferSnapshot
from spcl.engine.update import Update
from spcl.transforms import Transform

__all__ = ["Engine", "JointPassError"]

Array = NDArray[np.float64]


class JointPassError(Exception):
    """An error in a pass over several batches, of which any may have caused it."""


class Engine(ABC):
    """Computes the gradients of a step and applies its update; all engines give the same results up to rounding.

    Attributes:
        gradients: the gradients of the shared parameters, and the health of every gradient.
        capture_seconds: the time spent so far on capturing work.
        fallback_reason: why the latest batches did not all share one pass, or why no CUDA graphs are captured; None if
            they did, or were not asked to.
    """

    gradients: GradientMatrix
    capture_seconds: float = 0.0
    fallback_reason: str | None = None

    @abstractmethod
    def begin(self, plan: ReductionPlan) -> None:
        """Start a step: gradients are accumulated from zero."""

    @abstractmethod
    def augment(self, transform: Transform, inputs: Sequence[Inputs]) -> list[Inputs]:
        """Return inputs of tasks on the device, transformed."""

    @abstractmethod
    def backward(self, batches: Sequence[Samples]) -> dict[str, Tensor]:
        """Compute the gradients of the tasks' losses; return the logits by task, for methods that store them."""

    @property
    def joins_batches(self) -> bool:
        """Whether several batches may share a pass: whether :meth:`backward_jointly` ever does anything."""
        return False

    def backward_jointly(
        self, batches: Sequence[Samples], replays: Sequence[Sequence[Samples]]
    ) -> dict[str, Tensor] | None:
        """Compute what :meth:`backward` and :meth:`backward_replay` would, by passes over several batches.

        Return the logits by task, or None, having done nothing, if every batch needs a pass of its own. The health of
        the gradients is known for all together: if any is not finite, only separate passes show which. An error that a
        pass raises becomes a :class:`JointPassError`, since it may be that of any batch.
        """
        return None

    @abstractmethod
    def backward_replay(self, samples: Sequence[Samples], inputs: Sequence[Inputs], draw: int) -> None:
        """Add the gradient of memory's loss on the ``draw``-th replay batch of the step."""

    @abstractmethod
    def penalty_gradient(self) -> None:
        """Compute the gradient of the orthogonality penalty, times α unless that is relative."""

    def start_gramian(self, needed: bool) -> None:
        """Queue the work of which :meth:`gramian` waits for the result, so that the host can do other work first."""
        return

    @abstractmethod
    def gramian(self, needed: bool) -> tuple[Array | None, Array]:
        """Return the Gramian of the rows, if needed, and the health of every gradient, on the host.

        This is the only host–device synchronisation of a step.
        """

    def combine(self, weights: Array) -> None:
        """Form the sum of the rows, each times its weight, in row 0 (Alg. 2, line 10)."""
        self.gradients.combine(weights)

    def apply(self, rule: Callable[[Tensor], Tensor], coupled: bool) -> None:
        """Form the update of an elementwise rule in row 0."""
        self.gradients.apply(rule, coupled)

    def add_penalty(self, relative: float | None) -> None:
        """Add the orthogonality gradient to the update in row 0, at a relative length if there is one."""
        if relative is None:
            self.gradients.add_penalty()
        else:
            self.gradients.add_relative_penalty(relative)

    def is_update_finite(self) -> bool:
        """Return whether all of the combined update is finite."""
        return bool(self.gradients.rows[0].norm().isfinite())

    def mean_of_tasks(self) -> dict[nn.Parameter, Tensor]:
        """Return the mean of the tasks' gradients by parameter, in a step with memory whose gradient comes later."""
        direction = self.gradients.mean_of_tasks(len(self.gradients.plan.names) - 1)
        return dict(zip(self.gradients.parameters, self.gradients.views(direction), strict=True))

    @abstractmethod
    def assign_grads(self) -> None:
        """Assign the combined update and the heads' gradients to the parameters' ``.grad``."""

    @abstractmethod
    def update(self, update: Update) -> None:
        """Update the weights by the assigned gradients."""

    @abstractmethod
    def snapshot(self) -> BufferSnapshot:
        """Copy the model's buffers, so that the step can be undone."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know to compute in the same way, as plain data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`; other engines' states mean nothing."""
        return
