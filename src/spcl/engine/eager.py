"""Engine that runs every operation eagerly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from spcl.aggregation.gramians import Block, gramian_and_numbers
from spcl.batches import Inputs
from spcl.engine.augmentation import augmented
from spcl.engine.base import Engine, JointPassError
from spcl.engine.gradients import GradientMatrix
from spcl.engine.joint_pass import JointBatch
from spcl.engine.model import Samples, SharedModel
from spcl.engine.one_pass import OnePass
from spcl.engine.reduction import ReductionPlan
from spcl.engine.segments import UnsupportedError
from spcl.engine.snapshot import BufferSnapshot, total_norm
from spcl.engine.update import Update
from spcl.errors import is_out_of_memory
from spcl.methods.base import Method, Output
from spcl.orthogonality import LayerChoice, add_orthogonality_gradient, is_convolution
from spcl.transforms import Transform

__all__ = ["EagerEngine", "penalised_layers"]

Array = NDArray[np.float64]


class EagerEngine(Engine):
    """Engine that runs every operation eagerly, on any device."""

    matrix: type[GradientMatrix] = GradientMatrix
    """The class of :attr:`gradients`."""

    def __init__(self, model: SharedModel, method: Method) -> None:
        self.model = model
        self.method = method
        shared = [parameter for parameter in model.backbone.parameters() if parameter.requires_grad]
        self.gradients = self.matrix(shared, like=torch.empty(0, dtype=model.dtype, device=model.device))
        self._snapshot = BufferSnapshot(model)
        on_cpu = model.device.type == "cpu"  # a GPU has more to launch, and waits for it
        joins = on_cpu and not method.settings.weigh_heads  # a pass over all batches adds up the heads' gradients
        self.one_pass = OnePass(model, method, self.gradients, self._snapshot) if joins else None

    @override
    def begin(self, plan: ReductionPlan) -> None:
        if self.method.settings.weigh_heads:
            self.gradients.set_heads(self._weighed_heads())
        self._hold_rows(plan)
        for parameter in self.model.head_parameters():
            parameter.grad = None  # a head without samples in this step must not move

    @override
    def augment(self, transform: Transform, inputs: Sequence[Inputs]) -> list[Inputs]:
        return augmented(transform, inputs, self.model.device)

    @override
    def backward(self, batches: Sequence[Samples]) -> dict[str, Tensor]:
        logits = {}
        for index, samples in enumerate(batches):
            with self.model.task_errors(samples.task, samples.x, samples.y):
                value = self._backward_task(index, samples)
            if self.method.stores_logits and value is not None:
                logits[samples.task.name] = value
        return logits

    @property
    @override
    def joins_batches(self) -> bool:
        return self.one_pass is not None

    @override
    def backward_jointly(
        self, batches: Sequence[Samples], replays: Sequence[Sequence[Samples]]
    ) -> dict[str, Tensor] | None:
        if self.one_pass is None:
            return None
        try:
            logits = self.one_pass.backward(self._joint_batches(batches, replays))
        except Exception as error:
            if is_out_of_memory(error):  # separate passes need less
                self.one_pass, self.fallback_reason = None, "a pass over all batches ran out of memory"
            elif isinstance(error, UnsupportedError):
                self.one_pass.rule.refuse(str(error))
            raise JointPassError(str(error)) from error
        self.fallback_reason = self.one_pass.rule.reason
        if logits is None or not self.method.stores_logits:
            return None if logits is None else {}
        return {samples.task.name: each for samples, each in zip(batches, logits, strict=False)}

    @override
    def backward_replay(self, samples: Sequence[Samples], inputs: Sequence[Inputs], draw: int) -> None:
        loss = _counted(self.method.memory_loss(self._forward(samples, inputs), draw), samples[0])
        with self._gradient(len(self.gradients.plan.names) - 1, loss, samples, add=draw > 0):
            loss.backward()  # type: ignore[no-untyped-call]

    @override
    def penalty_gradient(self) -> None:
        row = self.gradients.penalty_row.zero_()
        views = dict(zip(self.gradients.parameters, self.gradients.views(row), strict=True))
        add_orthogonality_gradient(
            self.model.backbone, views, penalty_factor(self.method), penalised_layers(self.method)
        )

    @override
    def gramian(self, needed: bool) -> tuple[Array | None, Array]:
        health = self._known_health()
        if not needed:
            return None, health.cpu().numpy()
        products, numbers = self._measure(self.gradients.columns(), health.view(-1))
        return products, numbers.reshape(health.shape)

    @override
    def assign_grads(self) -> None:
        self.gradients.assign_grads(0)

    @override
    def update(self, update: Update) -> None:
        update.set_learning_rates()
        update.apply()

    @override
    def snapshot(self) -> BufferSnapshot:
        self._snapshot.refresh()
        self._copy_buffers()
        return self._snapshot

    def _joint_batches(self, batches: Sequence[Samples], replays: Sequence[Sequence[Samples]]) -> list[JointBatch]:
        memory = len(self.gradients.plan.names) - 1
        joint = [JointBatch(index, [samples]) for index, samples in enumerate(batches)]
        return joint + [JointBatch(memory, samples, draw) for draw, samples in enumerate(replays)]

    # -- hooks for subclasses

    def _weighed_heads(self) -> list[nn.Parameter]:
        """Return the parameters of heads whose gradients are weighed with the backbone's."""
        return [parameter for parameter in self.model.head_parameters() if parameter.requires_grad]

    def _hold_rows(self, plan: ReductionPlan) -> None:
        """Hold the rows in which the gradients are accumulated."""
        factored = not (self.method.elementwise or self.method.edits_memory)
        self.gradients.begin(plan, penalty=self.method.settings.alpha > 0.0, factored=factored)

    def _backward_task(self, index: int, samples: Samples) -> Tensor | None:
        """Compute the gradient of one task's loss; return its logits."""
        (output,) = self._forward([samples], [samples.x])
        loss = _counted(self.method.task_loss(output), samples)
        with self._gradient(index, loss, [samples]):
            loss.backward()  # type: ignore[no-untyped-call]
        return output.value.detach()

    def _forward(self, samples: Sequence[Samples], inputs: Sequence[Inputs]) -> list[Output]:
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

    def _known_health(self) -> Tensor:
        """Return loss, norms and buffers' norm of every gradient of the step."""
        return self.gradients.health[: len(self.gradients.plan.names)]

    def _measure(self, columns: Tensor | Sequence[Block], numbers: Tensor) -> tuple[Array, Array]:
        return gramian_and_numbers(columns, numbers)

    def _copy_buffers(self) -> None:
        if not self._snapshot.is_empty:
            self._snapshot.copy()


def _counted(loss: Tensor, samples: Samples) -> Tensor:
    return loss if samples.share == 1.0 else samples.share * loss


def penalty_factor(method: Method) -> float:
    """Return the factor of the orthogonality gradient, as long as no update is known."""
    return 1.0 if method.settings.adaptive else method.settings.alpha


def penalised_layers(method: Method) -> LayerChoice:
    """Return the layers that the method's orthogonality penalty is on."""
    return is_convolution if method.settings.layers == "convolutions" else None
