"""Replaying memory: the samples drawn for a step, edited where the method does so."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from spcl.batches import Inputs
from spcl.engine.base import Engine
from spcl.engine.model import Samples, SharedModel
from spcl.memory import Memory, ReplayBatch
from spcl.methods.base import Method, Task

__all__ = ["Replay", "ReplayedSamples", "with_inputs"]


@dataclass(frozen=True)
class ReplayedSamples:
    """One batch drawn from memory: the samples by task, with the inputs to train on, and the edits to write back."""

    samples: list[Samples]
    edits: list[tuple[ReplayBatch, Inputs]] = field(default_factory=list)


class Replay:
    """Draws the replay batches of a step."""

    def __init__(self, model: SharedModel, method: Method, memory: Memory | None) -> None:
        self._model = model
        self._method = method
        self._memory = memory

    def size(self, batches: Sequence[Samples], batch_size: int | None) -> int:
        """Return how many samples are replayed: by default as the largest batch has, and 0 while memory has none."""
        if self._memory is None or not len(self._memory):
            return 0
        return batch_size or max(len(group.y) for group in batches)

    def tasks(self) -> list[Task]:
        """Return the tasks whose samples are replayed."""
        if self._memory is None:
            return []
        buffers = self._memory.buffers.items()
        return [self._model.tasks[name] for name, buffer in buffers if self._memory.draws_from(buffer)]

    def draw(self, count: int, engine: Engine) -> ReplayedSamples:
        """Draw samples; ``engine`` has the gradients of the tasks, along which an editing method looks ahead."""
        assert self._memory is not None
        drawn = self._memory.draw(count)
        samples = [Samples(self._model.tasks[part.task], part.x, part.y, part.logits, replayed=True) for part in drawn]
        if not self._method.edits_memory:
            return ReplayedSamples(samples)
        model = _LookAhead(self._model, self._method, samples, engine.mean_of_tasks())
        inputs: list[Inputs] = [*self._method.edit(drawn, model)]
        return ReplayedSamples(with_inputs(samples, inputs), list(zip(drawn, inputs, strict=True)))


def with_inputs(samples: Sequence[Samples], inputs: Sequence[Inputs]) -> list[Samples]:
    """Return the samples with other inputs."""
    return [replace(group, x=x) for group, x in zip(samples, inputs, strict=True)]


class _LookAhead:
    """Implements :class:`spcl.methods.base.LookAhead` for the samples of one draw."""

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        samples: Sequence[Samples],
        direction: Mapping[nn.Parameter, Tensor],
    ) -> None:
        self._model = model
        self._method = method
        self._samples = samples
        self._direction = direction

    def loss(self, inputs: Sequence[Inputs]) -> Tensor:
        with self._model.evaluating():
            outputs = self._model.outputs(self._samples, inputs)
        return torch.stack([self._method.task_loss(output) * len(output.targets) for output in outputs]).sum()

    @contextmanager
    def ahead(self, rate: float) -> Iterator[None]:
        before = {parameter: parameter.detach().clone() for parameter in self._direction}
        with torch.no_grad():
            for parameter, change in self._direction.items():
                parameter.sub_(change, alpha=rate)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in before.items():
                    parameter.copy_(value)
