"""The shared backbone under a growing set of heads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from spcl.errors import SpclError, TaskError
from spcl.learner.tasks import Output, Task, describe_samples

__all__ = ["Samples", "Scenario", "SharedModel"]

Scenario = Literal["task", "class"]


@dataclass(frozen=True)
class Samples:
    """Samples of one task on their way through the model."""

    task: Task
    x: Tensor
    y: Tensor
    stored: Tensor | None = None


class SharedModel:
    """One backbone, one head per task; task-incremental or class-incremental logits.

    Task-incremental, a sample gets the logits of its own task's head. Class-incremental, it gets those of every
    classifier that was added so far, side by side in that order.
    """

    def __init__(
        self,
        backbone: nn.Module,
        scenario: Scenario,
        make_head: Callable[[int, int], nn.Module],
        seed: int,
        autocast: torch.dtype | None,
    ) -> None:
        if scenario not in ("task", "class"):
            raise SpclError(f"scenario must be 'task' or 'class', but it is {scenario!r}")
        if autocast not in (None, torch.bfloat16):
            raise SpclError(
                f"autocast must be None or torch.bfloat16, which needs no loss scaling, but it is {autocast}"
            )
        self.backbone = backbone
        self.scenario: Scenario = scenario
        self.tasks: dict[str, Task] = {}
        self.feature_dim: int | None = getattr(backbone, "feature_dim", None)
        self._make_head = make_head
        self._seed = seed
        self.autocast = autocast
        first = next(backbone.parameters(), None)
        if first is None or not any(parameter.requires_grad for parameter in backbone.parameters()):
            raise SpclError("the backbone has no parameter that can be trained")
        self.device = first.device

    @property
    def classifiers(self) -> list[Task]:
        """The classification tasks, in the order they were added."""
        return [task for task in self.tasks.values() if task.classes is not None]

    def build_heads(self, feature_dim: int) -> list[Task]:
        """Make the classifiers that are still missing, each from its own seed; gives those that were made."""
        self.feature_dim = feature_dim
        made = []
        for index, task in enumerate(self.tasks.values()):
            if task.head is None and task.classes is not None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self._seed * 1_000_003 + index)
                    task.head = self._make_head(feature_dim, task.classes).to(self.device)
                made.append(task)
        return made

    def outputs(self, samples: Sequence[Samples], inputs: Sequence[Tensor] | None = None) -> list[Output]:
        """What the model gives for samples of one or more tasks, in one pass through the backbone."""
        inputs = inputs if inputs is not None else [group.x for group in samples]
        with self._precision():
            x = inputs[0] if len(inputs) == 1 else torch.cat(list(inputs))
            features = self.backbone(x.to(self.device, non_blocking=True))
            joint = self._joint_logits(features) if self._is_joint(samples) else None
            outputs, start = [], 0
            for group in samples:
                part = slice(start, start + len(group.x))
                start = part.stop
                outputs.append(self._output(group, features[part], None if joint is None else joint[part]))
        return outputs

    def logits(self, x: Tensor, task: Task | None) -> Tensor:
        """Logits (or the custom head's output) for evaluation, over all classes seen when ``task`` is None."""
        with self._precision():
            features = self.backbone(x.to(self.device, non_blocking=True))
            return self._joint_logits(features) if task is None else self._head(task)(features)

    def probe(self, group: Samples) -> None:
        """Try samples of a new kind without training on them; an error names the task, and nothing has changed."""
        try:
            with torch.no_grad(), self.evaluating(), self._precision():
                features = self.backbone(group.x.to(self.device))
                if group.task.head is not None:
                    group.task.loss(group.task.head(features), group.y.to(self.device))
        except (RuntimeError, ValueError, TypeError) as error:
            kind = " with targets ".join(describe_samples(group.x, group.y))
            raise TaskError(f"task {group.task.name!r}: the model cannot take samples of {kind}: {error}") from error
        if group.task.classes is None:
            return
        if features.ndim != 2:
            raise TaskError(
                f"task {group.task.name!r}: a classifier needs features of shape (batch, features), but the backbone "
                f"gives {tuple(features.shape)}; pass head= and loss= instead of classes="
            )
        if self.feature_dim is None:
            self.feature_dim = features.shape[1]
        elif features.shape[1] != self.feature_dim:
            raise TaskError(
                f"task {group.task.name!r}: the backbone gives {features.shape[1]} features for it and "
                f"{self.feature_dim} for the tasks before"
            )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Backbone and heads in evaluation mode for a while."""
        modules = [self.backbone, *(task.head for task in self.tasks.values() if task.head is not None)]
        modes = [module.training for module in modules]
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.train(mode)

    def _is_joint(self, samples: Sequence[Samples]) -> bool:
        return self.scenario == "class" and any(group.task.classes is not None for group in samples)

    def _joint_logits(self, features: Tensor) -> Tensor:
        return torch.cat([self._head(task)(features) for task in self.classifiers], dim=1)

    def _head(self, task: Task) -> nn.Module:
        if task.head is None:
            raise TaskError(f"task {task.name!r} has seen no data yet")
        return task.head

    def _output(self, group: Samples, features: Tensor, joint: Tensor | None) -> Output:
        task, y = group.task, group.y.to(self.device, non_blocking=True)
        stored = None if group.stored is None else group.stored.to(self.device, non_blocking=True)
        if joint is not None and task.classes is not None:
            own = slice(task.offset, task.offset + task.classes)
            return Output(task, joint, y + task.offset, own, stored)
        return Output(task, self._head(task)(features), y, slice(0, task.classes), stored)

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)
