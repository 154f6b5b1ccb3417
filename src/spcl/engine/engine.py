"""What a step asks of an engine, and the engine that runs every operation eagerly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from spcl.aggregation.gramians import gramian_and_numbers
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples, SharedModel
from spcl.engine.reduction import ReductionPlan
from spcl.engine.snapshot import BufferSnapshot, total_norm
from spcl.methods.base import Method, Output
from spcl.orthogonality import add_orthogonality_gradient

__all__ = ["EagerEngine", "Engine"]

Array = NDArray[np.float64]


class Engine(Protocol):
    """Computes the gradients of a step and applies its update; what it computes does not depend on how.

    Attributes:
        gradients: the gradients of the shared parameters, and the health of every gradient.
    """

    gradients: GradientMatrix

    @property
    def capture_seconds(self) -> float:
        """The time spent so far on capturing work."""
        ...

    def begin(self, plan: ReductionPlan) -> None:
        """Start a step: gradients are accumulated anew."""
        ...

    def backward(self, batches: Sequence[Samples]) -> dict[str, Tensor]:
        """Compute the gradients of the tasks' losses; return the logits by task, for methods that store them."""
        ...

    def backward_replay(self, samples: Sequence[Samples], inputs: Sequence[Tensor], draw: int) -> None:
        """Add the gradient of memory's loss on the ``draw``-th batch of the step."""
        ...

    def penalty_gradient(self) -> None:
        """Compute α times the gradient of the orthogonality penalty."""
        ...

    def gramian(self, needed: bool) -> tuple[Array | None, Array]:
        """Return the Gramian of the rows, if needed, and the health of every gradient, on the host.

        This is where a step waits for a GPU.
        """
        ...

    def present_update(self) -> None:
        """Leave the combined update and the heads' gradients in the parameters' ``.grad``."""
        ...

    def update(self, optimizer: Optimizer) -> None:
        """Make one step of the optimiser."""
        ...

    def snapshot(self) -> BufferSnapshot:
        """Copy the model's buffers; the step can be undone from the copy."""
        ...


class EagerEngine:
    """The engine that runs every operation as it comes, on any device."""

    def __init__(self, model: SharedModel, method: Method) -> None:
        self.model = model
        self.method = method
        self.gradients = GradientMatrix([p for p in model.backbone.parameters() if p.requires_grad])
        self._snapshot = BufferSnapshot(model)

    @property
    def capture_seconds(self) -> float:
        """The time spent so far on capturing work: none."""
        return 0.0

    def begin(self, plan: ReductionPlan) -> None:
        """Start a step: gradients are accumulated anew."""
        self.gradients.begin(plan, penalty=self.method.settings.alpha > 0.0)
        for parameter in self.model.head_parameters():
            parameter.grad = None  # a head without samples in this step must not move

    def backward(self, batches: Sequence[Samples]) -> dict[str, Tensor]:
        """Compute the gradients of the tasks' losses one after the other."""
        logits = {}
        for index, samples in enumerate(batches):
            with self.model.task_errors(samples.task, samples.x, samples.y):
                value = self._backward_task(index, samples)
            if self.method.stores_logits and value is not None:
                logits[samples.task.name] = value
        return logits

    def backward_replay(self, samples: Sequence[Samples], inputs: Sequence[Tensor], draw: int) -> None:
        """Add the gradient of memory's loss on the ``draw``-th batch of the step."""
        loss = self.method.memory_loss(self._forward(samples, inputs), draw)
        with self._gradient(len(self.gradients.plan.names) - 1, loss, samples, add=draw > 0):
            loss.backward()  # type: ignore[no-untyped-call]

    def penalty_gradient(self) -> None:
        """Compute α times the gradient of the orthogonality penalty in closed form."""
        row = self.gradients.penalty_row.zero_()
        views = dict(zip(self.gradients.parameters, self.gradients.views(row), strict=True))
        add_orthogonality_gradient(self.model.backbone, views, self.method.settings.alpha)

    def gramian(self, needed: bool) -> tuple[Array | None, Array]:
        """Return the Gramian of the rows, if needed, and the health of every gradient, on the host."""
        health = self.gradients.health[: len(self.gradients.plan.names)]
        if not needed:
            return None, health.cpu().numpy()
        products, numbers = self._measure(self.gradients.measured_rows, health.view(-1))
        return products, numbers.reshape(health.shape)

    def present_update(self) -> None:
        """Leave the combined update and the heads' gradients in the parameters' ``.grad``."""
        self.gradients.present(0)

    def update(self, optimizer: Optimizer) -> None:
        """Make one step of the optimiser."""
        optimizer.step()

    def snapshot(self) -> BufferSnapshot:
        """Copy the model's buffers; the step can be undone from the copy."""
        self._snapshot.refresh()
        self._copy_buffers()
        return self._snapshot

    # -- what other engines do in their own way

    def _backward_task(self, index: int, samples: Samples) -> Tensor | None:
        """Compute the gradient of one task's loss; return its logits."""
        (output,) = self._forward([samples], [samples.x])
        loss = self.method.task_loss(output)
        with self._gradient(index, loss, [samples]):
            loss.backward()  # type: ignore[no-untyped-call]
        return output.value.detach()

    def _forward(self, samples: Sequence[Samples], inputs: Sequence[Tensor]) -> list[Output]:
        return self.model.outputs(samples, inputs)

    @contextmanager
    def _gradient(self, index: int, loss: Tensor, samples: Sequence[Samples], add: bool = False) -> Iterator[None]:
        """Accumulate the block's backward pass in a gradient, and note the gradient's health."""
        with self.gradients.accumulate(index):
            yield
        parts = [p.grad for p in self.model.trained_head_parameters(samples) if p.grad is not None]
        if not self.gradients.plan.is_separate:  # else the Gramian holds the norm of the shared part
            parts.append(self.gradients.open_row)
        health = torch.stack([loss.detach(), total_norm(parts, loss.detach()), self._snapshot.norm()])
        self._note_health(index, health, add)

    def _note_health(self, index: int, health: Tensor, add: bool) -> None:
        row = self.gradients.health[index]
        (row.add_ if add else row.copy_)(health)

    def _measure(self, rows: Tensor, numbers: Tensor) -> tuple[Array, Array]:
        return gramian_and_numbers(rows, numbers)

    def _copy_buffers(self) -> None:
        self._snapshot.copy()
