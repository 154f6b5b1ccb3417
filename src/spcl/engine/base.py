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
        logits: the logits by source, for methods that store them.
        is_joint: whether batches shared a pass: health then says only whether *all* gradients are finite.
        memory_fault: why the model could not be trained on a replay batch; None if it could.
    """

    logits: dict[str, Tensor]
    is_joint: bool = False
    memory_fault: str | None = None


class Stateful(Protocol):
    """Has a state of plain data and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        ...


class Engine(ABC):
    """Computes the gradients of a step and applies its update; all engines give the same results up to rounding.

    If batches turn out not to share a pass, :meth:`backward` (or :meth:`gramian`, with several ranks) raises
    :class:`~spcl.engine.segments.UnsupportedError`; the step is undone and repeated with one pass per batch.

    Attributes:
        gradients: the gradients of the shared parameters, and the health of every gradient.
        capture_seconds: the time spent so far on capturing work.
        fallback_reason: why the latest batches did not share one pass, or why no CUDA graphs are captured; else None.
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
            batches: the batches of sources, then replay batches.
            transform: augments the inputs, all sources' inputs in one call; None for no augmentation.
            apart: whether every batch gets its own pass.
        """

    @abstractmethod
    def mean_of_sources(self) -> dict[nn.Parameter, Tensor]:
        """Return the mean gradient of the sources by parameter, before memory's gradient has been computed."""

    @abstractmethod
    def penalty_gradient(self) -> None:
        """Compute the gradient of the orthogonality penalty (line 5), times α; without α if α is relative."""

    @abstractmethod
    def gramian(self, needed: bool) -> Callable[[], tuple[Array | None, Array]]:
        """Return a function that gives the Gramian of the rows, if it is needed; a GPU may start to compute it now.

        That function returns the Gramian or None, and the health of every gradient (its loss, its norm and the norm of
        the model's buffers), on the host: the only host–device synchronisation of a step, before which the host can do
        other work.
        """

    @abstractmethod
    def combine(self, rule: Rule, *, check: bool) -> bool:
        """Write the update into row 0 (line 10), including the orthogonality gradient if it is added to the update.

        If ``check``, return whether the update is finite, else True.
        """

    @abstractmethod
    def update(self, update: Update) -> None:
        """Assign the update and the heads' gradients to the parameters' ``.grad``, and update the weights by them."""

    @abstractmethod
    def snapshot(self) -> BufferSnapshot:
        """Copy the model's buffers, so that the step can be undone."""
