"""Interface of an engine: what a step asks for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl.engine.model import BufferSnapshot, StepBatch
from spcl.engine.rows import GradientMatrix, ReductionPlan
from spcl.engine.update import Update
from spcl.transforms import Transform

Array = NDArray[np.float64]

Rule = Array | Callable[[Tensor], Tensor]
"""How gradients become an update: one weight per row, or a function of the rows, e.g. :meth:`Method.combine`."""


class Passes(NamedTuple):
    """What the passes over the batches of a step found.

    Attributes:
        logits: the logits by task, for methods that store them.
        is_joint: whether batches shared a pass: the health of the gradients is then known for all of them together.
        memory_fault: why the model could not be trained on a replay batch; None if it could.
    """

    logits: dict[str, Tensor]
    is_joint: bool = False
    memory_fault: str | None = None


class Stateful(Protocol):
    """Anything whose state is plain data and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        ...


class Engine(ABC):
    """Computes the gradients of a step and applies its update; all engines give the same results up to rounding.

    Batches that cannot share a pass after all raise an :class:`~spcl.engine.segments.UnsupportedError`, from
    :meth:`backward` or, where ranks meet, from :meth:`gramian`: the step is then undone and repeated with a pass each.

    Attributes:
        gradients: the gradients of the shared parameters, and the health of every gradient.
        capture_seconds: the time spent so far on capturing work.
        fallback_reason: why the latest batches did not all share one pass, or why no CUDA graphs are captured; None if
            they did, or were not asked to.
        history: what a resumed run must know to compute in the same way; None if there is nothing.
    """

    gradients: GradientMatrix
    capture_seconds: float = 0.0
    fallback_reason: str | None = None
    history: Stateful | None = None

    @abstractmethod
    def begin(self, plan: ReductionPlan) -> None:
        """Start a step: gradients are accumulated from zero."""

    @abstractmethod
    def backward(self, batches: Sequence[StepBatch], transform: Transform | None, *, apart: bool = False) -> Passes:
        """Compute the gradients of the batches' losses by as few passes as possible (Alg. 2, lines 3, 4 and 7).

        Args:
            batches: the batches of tasks, then replay batches.
            transform: augments the inputs, those of all tasks in one call, if it is not None.
            apart: whether to take a pass for each batch.
        """

    @abstractmethod
    def mean_of_tasks(self) -> dict[nn.Parameter, Tensor]:
        """Return the mean of the tasks' gradients by parameter, in a step with memory whose gradient comes later."""

    @abstractmethod
    def penalty_gradient(self) -> None:
        """Compute the gradient of the orthogonality penalty, times α unless that is relative (line 5)."""

    @abstractmethod
    def gramian(self, needed: bool) -> Callable[[], tuple[Array | None, Array]]:
        """Start to compute the Gramian of the rows, if it is needed; return the function that waits for it.

        That function returns the Gramian or None, and the health of every gradient, on the host: this is the only
        host–device synchronisation of a step, before which the host can do other work.
        """

    @abstractmethod
    def combine(self, rule: Rule, *, check: bool) -> bool:
        """Form the update in row 0 (line 10), with the orthogonality gradient where that is added to the update.

        Return whether all of it is finite, if that is to be checked.
        """

    @abstractmethod
    def update(self, update: Update) -> None:
        """Assign the update and the heads' gradients to the parameters' ``.grad``, and update the weights by them."""

    @abstractmethod
    def snapshot(self) -> BufferSnapshot:
        """Copy the model's buffers, so that the step can be undone."""
